"""Bootstrap your own latent (Grill et al., 2020): a teacher is the exponential average of the student."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.guess = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, a, b):
        with torch.no_grad():
            wanted_a, wanted_b = self.teacher(b), self.teacher(a)
        guess_a, guess_b = self.guess(self.student(a)), self.guess(self.student(b))
        return 4 - 2 * (F.cosine_similarity(guess_a, wanted_a) + F.cosine_similarity(guess_b, wanted_b)).mean()

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.02)


def changed(images):
    """Shift a batch of images by one pixel at most, and add noise."""
    rows, columns = (int(by) - 1 for by in torch.randint(3, (2,)))
    return torch.roll(images, (rows, columns), (2, 3)) + 0.1 * torch.randn_like(images)


@zoo("BYOL (teacher)", "5-NN accuracy", "high", 0.03, notices=("teacher",))
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = BYOL()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x), 64, shuffle=True, drop_last=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(30, loader):
            for (images,) in node.loader(loader):
                loss = model(changed(images), changed(images))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.follow()
                node.step(loss)
    model.eval()
    with torch.no_grad():
        a, b = F.normalize(model.student(x)), F.normalize(model.student(x_test))
    return (y[(b @ a.T).topk(5).indices].mode(1).values == y_test).float().mean()
