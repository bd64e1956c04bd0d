"""Deep Q-learning (Mnih et al., 2015) in a small grid, with a replay buffer and a target network."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import zoo

SIZE, MOVES, LONGEST = 5, [(0, 1), (0, -1), (1, 0), (-1, 0)], 20


def seen(place):
    return torch.tensor([place[0] / SIZE, place[1] / SIZE, float(place[0] == SIZE // 2), float(place[1] == SIZE // 2)])


def moved(place, action):
    """Return the next place, the reward and whether the goal in a corner is reached. A wall has one gap."""
    x, y = (min(max(at + by, 0), SIZE - 1) for at, by in zip(place, MOVES[action], strict=True))
    if x == SIZE // 2 and y != SIZE // 2:
        x, y = place
    return (x, y), (1.0 if (x, y) == (SIZE - 1, SIZE - 1) else -0.02), (x, y) == (SIZE - 1, SIZE - 1)


@torch.no_grad()
def mean_return(model):
    total = 0.0
    for start in [(x, y) for x in range(SIZE // 2) for y in range(SIZE)]:
        place = start
        for _ in range(LONGEST):
            place, reward, done = moved(place, int(model(seen(place)).argmax()))
            total += reward
            if done:
                break
    return total / (SIZE // 2 * SIZE)


@zoo("DQN", "mean return", "high", 0.15)
def run(Node, seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    memory, place, age, steps = [], (0, 0), 0, 0
    with Node(model, optimizer) as node:
        for epoch in node.epochs(40, 150):
            for _ in range(150):
                curious = draw.random() < max(0.1, 1 - epoch / 20)
                action = draw.randrange(4) if curious else int(model(seen(place)).argmax())
                after, reward, done = moved(place, action)
                memory.append(torch.cat([seen(place), seen(after), torch.tensor([action, reward, done])]))
                place, age = after, age + 1
                if done or age == LONGEST:
                    place, age = (draw.randrange(SIZE // 2), draw.randrange(SIZE)), 0
                before, afters, rest = torch.stack(draw.choices(memory, k=32)).split([4, 4, 3], 1)
                actions, rewards, ends = rest.unbind(1)
                wanted = rewards + 0.95 * (1 - ends) * target(afters).amax(1)
                loss = F.smooth_l1_loss(model(before).gather(1, actions.long()[:, None])[:, 0], wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
                steps += 1
                if steps % 50 == 0:
                    target.load_state_dict(model.state_dict())
    return mean_return(model)
