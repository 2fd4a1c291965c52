"""Lightning's Trainer with DDP, whose ModelCheckpoint saves after a training step, through its plugin or AsyncCheckpointIO.

The measurement runs inside `Trainer.fit`, at its start, and calls the callback's own hook as the loop would after a batch.
"""

import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from measure import measure
from plan import WORLD_SIZE
from training import Training

from ways import WAYS
from ways.files import sync


class Module(LightningModule):
    def __init__(self, training):
        super().__init__()
        self.model = training.model
        self._training = [training]  # not a part of the module

    def configure_optimizers(self):
        return self._training[0].optimizer

    def training_step(self, batch):
        raise AssertionError("the measurement ends the process before the first step")


class Lightning(Callback):
    """Measures, once the trainer is ready for its first step: by then it has loaded what it resumes from."""

    def __init__(self, plan, training, writer):
        self._plan, self._training, self._writer = plan, training, writer
        self._callback = ModelCheckpoint(plan.url, filename="{step}", every_n_train_steps=1)

    @property
    def callbacks(self):
        return [self, self._callback]

    def on_train_start(self, trainer, module):
        self._trainer, self._module = trainer, module
        measure(self._plan, self, self._training)
        os._exit(0)

    def save(self, number):
        loop = self._trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed += 1  # ModelCheckpoint saves a step once
        self._callback.on_train_batch_end(self._trainer, self._module, None, None, number)

    def wait(self):
        if self._plan.rank == 0:
            if self._writer is not None:
                self._writer._executor.submit(lambda: None).result()  # it stores one checkpoint after another
            if self._plan.is_local:
                sync(self._callback.best_model_path)
                sync(self._plan.url)

    def forget(self):
        pass  # save_top_k

    def load(self):
        pass

    def reload(self):
        loaded = self._trainer.strategy.load_checkpoint(newest(self._plan))
        self._module.load_state_dict(loaded["state_dict"])
        self._training.optimizer.load_state_dict(loaded["optimizer_states"][0])


def newest(plan):
    if plan.is_local:
        return str(next(Path(plan.url).glob("*.ckpt")))
    import fsspec

    return f"s3://{fsspec.filesystem('s3').glob(f'{plan.url}/*.ckpt')[0]}"


def run(plan):
    torch.set_num_threads(1)
    os.environ.update(NODE_RANK="0", LOCAL_RANK=str(plan.rank), WORLD_SIZE=str(WORLD_SIZE))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan.group_port))
    training = Training(plan.mebibytes, plan.matmuls, fresh=plan.phase == "resume")
    writer = AsyncCheckpointIO() if WAYS[plan.way].option == "async" else None
    measured = Lightning(plan, training, writer)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment(), *([writer] if writer else [])],
        callbacks=measured.callbacks,
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.utils.data.DataLoader(torch.zeros(1000, 1))
    trainer.fit(Module(training), data, ckpt_path=newest(plan) if plan.phase == "resume" else None)
