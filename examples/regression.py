"""Regression: one machine's sensor after another.

A network learns how the reading of one machine depends on twenty measurements, then of a second
machine that runs at another operating point and follows another law. Learning the second ruins the
predictions for the first; a guard preserves them. Targets are real numbers, so the guard protects
the predicted number of every sample by default.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import forgetless

EPOCHS, TRAIN = 15, 700
Data = tuple[Tensor, Tensor]


def machines() -> tuple[Data, Data]:
    """Measurements (900, 20) and readings (900, 1); the first column is the operating point."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for operating_point in (2.0, -2.0):
        x = torch.randn(900, 20, generator=generator)
        x[:, 0] = operating_point
        bent, straight = torch.randn(2, 20, 1, generator=generator) / 20**0.5
        found.append((x, (x @ bent).sin() + x @ straight))
    return found[0], found[1]


def error(model: nn.Module, data: Data) -> float:
    """Root mean squared error on test data."""
    x, y = (part[TRAIN:] for part in data)
    with torch.no_grad():
        return mse_loss(model(x), y).sqrt().item()


def learn(guarded: bool) -> tuple[float, float, float]:
    """Error on the first machine after learning it, after the second, and on the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first, second = machines()
    after_first = 0.0
    with forgetless.Guard(model, optimizer, forgetless.PCAOGD(components=100)) as guard:
        for x, y in (first, second):
            for _ in range(EPOCHS):
                for batch in torch.randperm(TRAIN).split(32):
                    optimizer.zero_grad()
                    mse_loss(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            if x is first[0]:
                after_first = error(model, first)
                if guarded:
                    guard.end_task((x[:TRAIN], y[:TRAIN]))
    return after_first, error(model, first), error(model, second)


def main() -> None:
    """Train with and without the guard, and compare."""
    learned, plain_first, plain_second = learn(guarded=False)
    _, guarded_first, guarded_second = learn(guarded=True)
    print("root mean squared error           plain  guarded")
    print(f"first machine, after learning it   {learned:.2f}     {learned:.2f}")
    print(f"first machine, after the second    {plain_first:.2f}     {guarded_first:.2f}")
    print(f"second machine                     {plain_second:.2f}     {guarded_second:.2f}")
    assert guarded_first - learned < (plain_first - learned) / 2, "the guard halves forgetting"
    assert guarded_second < plain_second + 0.1, "at a cost of less than 0.1 on the second machine"


if __name__ == "__main__":
    main()
