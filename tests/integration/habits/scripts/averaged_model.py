"""Keep an EMA in an AveragedModel."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"ema": ema}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
end(model=model, ema=ema)
