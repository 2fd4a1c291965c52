"""The training that is checkpointed: one replicated model with AdamW, as under DDP, and steps that take CPU time only."""

import time

import torch

WIDTH = 1024
MATRIX = 512
STEPS = 10


class Training:
    """A state of about `mebibytes`, and the work between its checkpoints.

    Args:
        mebibytes: The parameters and AdamW's two averages together.
        matmuls: How many make a step.
        fresh: As at a start: parameters that nobody has filled, and an optimizer that has not stepped.
        device: Where it lies and steps.

    """

    def __init__(self, mebibytes, matmuls, *, fresh=False, device="cpu"):
        self.device = device
        layers = max(1, round(mebibytes * 2**20 / 3 / 4 / WIDTH**2))
        linear = [torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH, device=device) for _ in range(layers)]
        self.model = torch.nn.Sequential(*linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._matmuls = matmuls
        self._factors = [torch.rand(MATRIX, MATRIX, device=device) / MATRIX for _ in range(3)]
        if not fresh:
            self._fill()

    @property
    def tensors(self):
        averages = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        return [
            *(parameter.data for parameter in self.model.parameters()),
            *(state[name] for name in ("exp_avg", "exp_avg_sq") for state in averages),
        ]

    @property
    def bytes(self):
        return sum(tensor.nbytes for tensor in self.tensors)

    def stamp(self, number):
        """Change every tensor, so that a checkpoint shows of when each is."""
        for tensor in self.tensors:
            tensor.view(-1)[0] = number

    def checksums(self):
        return [int(tensor.view(-1).view(torch.int32).sum(dtype=torch.int64)) for tensor in self.tensors]

    def ten_steps_s(self):
        self.synchronize()
        started_s = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self.synchronize()
        return time.perf_counter() - started_s

    def step(self):
        left, right, product = self._factors
        for _ in range(self._matmuls):
            torch.mm(left, right, out=product)

    def synchronize(self):
        """Wait for what the device has still to do."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _fill(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.manual_seed(0)
        pattern = torch.rand(WIDTH * WIDTH).to(self.device)
        for number, tensor in enumerate(self.tensors):
            torch.add(pattern[: tensor.numel()].view_as(tensor), number, out=tensor)


def matmuls_in(seconds, device="cpu"):
    """Return how many matmuls one thread of this machine, or the GPU, does in that time."""
    torch.set_num_threads(1)
    training = Training(1, 50, fresh=True, device=device)
    training.ten_steps_s()
    return max(1, round(50 * STEPS * seconds / training.ten_steps_s()))
