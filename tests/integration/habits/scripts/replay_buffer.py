"""Keep a replay buffer of tensors."""

import collections

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)


class Replay:
    def __init__(self):
        self.kept = collections.deque(maxlen=8)

    def state_dict(self):
        return {"kept": list(self.kept)}

    def load_state_dict(self, state):
        self.kept = collections.deque(state["kept"], maxlen=8)


replay = Replay()
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"replay": replay}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            replay.kept.append(torch.full((4, 8), float(step.number)) / STEPS)
            x = inputs[step.indices] + torch.stack(list(replay.kept)).mean(0)
            loss = torch.nn.functional.mse_loss(session.model(x), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, replay=replay)
