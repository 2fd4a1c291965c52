"""What one writes by hand: rank 0 saves into a scratch folder, copies to the storage, and makes sure that it stays."""

import os
import shutil
from pathlib import Path

from measure import measure
from training import Training

from ways.files import load_training, save_training, sync


class TorchSave:
    def __init__(self, plan, training):
        self._is_first = plan.rank == 0
        self._training = training
        self._scratch = Path(plan.folder, "model.pt")
        self._stored = Path(plan.url, "model.pt")

    def save(self, number):
        if not self._is_first:
            return
        save_training(self._training, number, self._scratch)
        part = self._stored.with_suffix(".part")
        shutil.copyfile(self._scratch, part)
        sync(part)
        os.replace(part, self._stored)
        sync(self._stored.parent)
        self._scratch.unlink()

    def wait(self):
        pass

    def forget(self):
        pass

    def load(self):
        load_training(self._training, self._stored)

    reload = load


def run(plan):
    training = Training(plan.mebibytes, plan.matmuls, fresh=plan.phase == "resume", device=plan.device)
    measure(plan, TorchSave(plan, training), training)
