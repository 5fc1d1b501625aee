"""Learn by acting: an environment and a replay memory of each rank, a falling chance."""

import collections
import random

import torch
from habits.common import RANK, STEPS, end, net, strike

from rekindle.training.torch import Session

Move = collections.namedtuple("Move", "state action reward")


class Walk:
    """A walk of eight places, from its own start in each rank."""

    def __init__(self, seed):
        self.random, self.place = random.Random(seed), seed % 8

    def act(self, action):
        self.place = (self.place + action + self.random.randint(-1, 1)) % 8
        return 1.0 - self.place / 8

    def state(self):
        return torch.nn.functional.one_hot(torch.tensor(self.place), 8).float()

    def state_dict(self):
        return {"random": self.random, "place": self.place}

    def load_state_dict(self, state):
        self.random, self.place = state["random"], state["place"]


walk, memory = Walk(RANK), collections.deque(maxlen=12)
progress = {"epsilon": 0.9, "reward": 0.0}
model = net()
target = net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with Session(
    model=model,
    optimizer=optimizer,
    ddp=True,
    extra={"target": target},
    per_rank={"walk": walk, "memory": memory, "progress": progress},
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            for _ in range(3):
                state = walk.state()
                free = random.random() < progress["epsilon"]
                action = random.choice((-1, 1)) if free else int(model(state).sign())
                reward = walk.act(action)
                memory.append(Move(state, action, reward))
                progress["reward"] = 0.9 * progress["reward"] + 0.1 * reward
            chosen = random.sample(memory, 3)
            states = torch.stack([each.state for each in chosen])
            rewards = torch.tensor([[each.reward] for each in chosen])
            with torch.no_grad():
                goal = rewards + 0.9 * target(states)
            loss = torch.nn.functional.smooth_l1_loss(session.model(states), goal)
            step.log(loss=loss, **progress)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["epsilon"] = max(0.1, progress["epsilon"] * 0.95)
            if step.number % 5 == 4:
                target.load_state_dict(model.state_dict())
end(model=model, target=target, walk=walk.place, memory=list(memory), progress=progress)
