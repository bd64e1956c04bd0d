"""Advantage actor-critic (Mnih et al., 2016) on sixteen poles that are balanced at once."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import zoo

POLES, LONGEST, HORIZON = 16, 100, 8


def pushed(state, action):
    """Return poles (angle, speed) after a push to one side, and which of them have fallen."""
    angle, speed = state.unbind(1)
    speed = speed + 0.1 * angle + 0.04 * (2 * action - 1)
    angle = angle + 0.2 * speed
    return torch.stack([angle, speed], 1), angle.abs() > 0.5


@torch.no_grad()
def mean_length(model):
    """Return the steps for which poles stay up, of at most 100."""
    state = 0.2 * torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    up, steps = torch.ones(64, dtype=torch.bool), torch.zeros(64)
    for _ in range(LONGEST):
        state, fallen = pushed(state, model(state)[:, :2].argmax(1))
        up &= ~fallen
        steps += up
    return steps.mean()


@zoo("actor-critic", "steps until a fall", "high", 15.0)
def run(Node, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))  # two actions and a value
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    state = 0.2 * torch.randn(POLES, 2)
    with Node(model, optimizer) as node:
        for _ in node.epochs(30, 10 * HORIZON * POLES):
            for _ in range(10):
                rewards, falls, values, logs, spread = [], [], [], [], []
                for _ in range(HORIZON):
                    shown = model(state)
                    chances = F.log_softmax(shown[:, :2], 1)
                    action = torch.multinomial(chances.detach().exp(), 1)[:, 0]
                    state, fallen = pushed(state, action)
                    state = torch.where(fallen[:, None], 0.2 * torch.randn(POLES, 2), state)
                    rewards.append(1.0 - fallen.float())
                    falls.append(fallen.float())
                    values.append(shown[:, 2])
                    logs.append(chances.gather(1, action[:, None])[:, 0])
                    spread.append(-(chances.exp() * chances).sum(1))
                ahead, losses = model(state)[:, 2].detach(), []
                for t in reversed(range(HORIZON)):
                    ahead = rewards[t] + 0.95 * (1 - falls[t]) * ahead
                    advantage = ahead - values[t]
                    losses.append(0.5 * advantage**2 / 20 - logs[t] * advantage.detach() - 0.01 * spread[t])
                loss = torch.stack(losses).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                node.step(loss, samples=HORIZON * POLES)
    return mean_length(model)
