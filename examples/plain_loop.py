"""Two lines in a training loop: digits, then digits lying on their side.

A small network learns 8×8 digits with Adam, then the same digits rotated by a right angle. Without
a guard it forgets many of the upright ones. With one, every update of Adam is projected away from
the directions in which the outputs on the first task change.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forgetless

EPOCHS = 15


def tasks() -> list[tuple[TensorDataset, TensorDataset]]:
    """(training, test) data: upright digits, and the same rotated by a right angle."""
    data = load_digits()
    images = torch.from_numpy(data.images).float() / 16
    labels = torch.from_numpy(data.target)
    turned = [images, images.rot90(1, (1, 2))]
    return [
        (TensorDataset(x[:1300], labels[:1300]), TensorDataset(x[1300:], labels[1300:]))
        for x in turned
    ]


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Share of test images classified correctly, in percent."""
    images, labels = test.tensors
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).float().mean().item()


def learn(guarded: bool) -> tuple[float, float, float]:
    """Accuracy on the first task after learning it and after the second, and on the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guard = forgetless.Guard(model, optimizer, forgetless.PCAOGD(components=800, samples=1300))
    after_first = 0.0
    for number, (train, _) in enumerate(tasks()):
        loader = DataLoader(train, batch_size=32, shuffle=True)
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        if number == 0:
            after_first = accuracy(model, tasks()[0][1])
            if guarded:
                guard.end_task(loader)
    if guarded:
        print(guard.stats())
    return after_first, accuracy(model, tasks()[0][1]), accuracy(model, tasks()[1][1])


def main() -> None:
    """Train with and without the guard, and compare."""
    learned, plain_first, plain_second = learn(guarded=False)
    _, guarded_first, guarded_second = learn(guarded=True)
    print("accuracy in %                  plain  guarded")
    print(f"first task, after learning it  {learned:5.1f}    {learned:5.1f}")
    print(f"first task, after the second   {plain_first:5.1f}    {guarded_first:5.1f}")
    print(f"second task                    {plain_second:5.1f}    {guarded_second:5.1f}")
    forgotten, guarded_forgotten = learned - plain_first, learned - guarded_first
    assert guarded_forgotten < forgotten / 2, "the guard halves forgetting"
    assert guarded_second > plain_second - 5, "at a cost of less than five points on the new task"


if __name__ == "__main__":
    main()
