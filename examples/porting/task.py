"""The data and the model that all programs in this folder share."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)
train = TensorDataset(x_train, y_train)
EPOCHS = 12
SAMPLES = EPOCHS * len(train)  # The total of all workers.


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def right(model, start=0, step=1):
    """How many of every step-th test image the model gets right."""
    return (model(x_test[start::step]).argmax(1) == y_test[start::step]).sum().item()
