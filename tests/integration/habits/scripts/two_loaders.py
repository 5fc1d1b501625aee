"""Train with labelled and unlabelled batches together, and pseudo labels by a rising threshold."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import Session, init


def main():
    init("gloo")
    inputs, targets = samples()
    labelled, rest = TensorDataset(inputs[:64], targets[:64]), TensorDataset(inputs[64:192])
    samplers = [DistributedSampler(each, seed=n) for n, each in enumerate((labelled, rest))]
    loaders = [
        DataLoader(each, batch_size=size, sampler=sampler)
        for each, size, sampler in zip((labelled, rest), (4, 8), samplers, strict=True)
    ]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    threshold, used = 0.5, 0
    with Session(model=model, optimizer=optimizer, ddp=True) as session:
        for epoch in session.epochs(3):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            for (x, y), (more,) in session.batches(lambda: zip(*loaders, strict=True)):
                with session.step() as step:
                    strike(step.number)
                    with torch.no_grad():
                        guess = model(more)
                    sure = (guess.abs() > threshold).squeeze(1)
                    loss = torch.nn.functional.mse_loss(session.model(x), y)
                    again = session.model(more + 0.1 * torch.randn_like(more))
                    loss = loss + ((again - guess).square().squeeze(1) * sure).mean()
                    step.log(loss=loss, threshold=threshold, used=used)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                threshold = 0.99 * threshold + 0.01 * guess.abs().mean().item()
                used += int(sure.sum())
    end(model=model, optimizer=optimizer, values=[threshold, used])


if __name__ == "__main__":
    main()
