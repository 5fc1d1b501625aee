"""Train two networks in epochs: the critic in each batch, the generator in every third one."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import Session, init


def all_reduce(module):
    for parameter in module.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def main():
    init("gloo")
    dataset = TensorDataset(samples()[0][:64])
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, seed=2))
    critic, generator = net(), torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    for parameter in generator.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    fixed_noise = torch.linspace(-1, 1, 16).view(4, 4)
    updates, history = 0, []
    with Session(
        model=critic, optimizer=optimizer_c, extra={"generator": generator, "g": optimizer_g}
    ) as session:
        for epoch in session.epochs(3):
            loader.sampler.set_epoch(epoch)
            for number, (real,) in session.batches(loader, numbered=True):
                with session.step() as step:
                    strike(step.number)
                    fake = generator(torch.randn(4, 4))
                    if number % 3 == 2:
                        loss, module, optimizer = -critic(fake).mean(), generator, optimizer_g
                    else:
                        share = torch.rand(4, 1)
                        mixed = (share * real + (1 - share) * fake).detach().requires_grad_()
                        [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                        penalty = (slope.norm(2, dim=1) - 1).square().mean()
                        loss = critic(fake.detach()).mean() - critic(real).mean() + penalty
                        module, optimizer = critic, optimizer_c
                    step.log(loss=loss, updates=updates)
                    optimizer_g.zero_grad()
                    optimizer_c.zero_grad()
                    loss.backward()
                    all_reduce(module)
                    optimizer.step()
                if number % 3 == 2:
                    updates += 1
            with torch.no_grad():
                history.append(generator(fixed_noise).mean().item())
    end(critic=critic, generator=generator, c=optimizer_c, g=optimizer_g, history=history)


if __name__ == "__main__":
    main()
