"""Train with a class that calls the hooks of callbacks, with a history and early stopping."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import Session, init


class Callback:
    def on_epoch_begin(self, trainer):
        pass

    def on_batch_end(self, trainer, loss):
        pass

    def on_epoch_end(self, trainer, score):
        pass


class History(Callback):
    def __init__(self):
        self.batches, self.epochs = [], {}

    def on_batch_end(self, trainer, loss):
        self.batches.append((trainer.global_step, loss))

    def on_epoch_end(self, trainer, score):
        self.epochs.setdefault("score", []).append(score)


class EarlyStopping(Callback):
    def __init__(self, patience):
        self.patience, self.waited, self.best = patience, 0, None

    def on_epoch_end(self, trainer, score):
        if self.best is None or score < self.best:
            self.best, self.waited = score, 0
        else:
            self.waited += 1
            trainer.should_stop = self.waited >= self.patience


class WeightNoise(Callback):
    """Lower the noise of the inputs with each batch."""

    def __init__(self):
        self.sigma = 0.2

    def on_batch_end(self, trainer, loss):
        self.sigma *= 0.95
        trainer.sigma = self.sigma


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks = max_epochs, callbacks
        self.current_epoch = self.global_step = 0
        self.should_stop, self.sigma, self.logged = False, 0.2, {}

    def call(self, hook, *arguments):
        for each in self.callbacks:
            getattr(each, hook)(self, *arguments)

    def fit(self, model, loader, test_loader):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model = model
        with Session(model=model, optimizer=optimizer, scheduler=scheduler, ddp=True) as session:
            self.session = session
            for epoch in session.epochs(self.max_epochs):
                self.current_epoch = epoch
                loader.sampler.set_epoch(epoch)
                self.call("on_epoch_begin")
                for batch in session.batches(loader):
                    loss = self.training_step(batch, optimizer)
                    self.global_step += 1
                    self.logged["loss"] = loss
                    self.call("on_batch_end", loss)
                scheduler.step()
                score = session.run(self.validate, test_loader)
                self.call("on_epoch_end", score)
                if self.should_stop:
                    break

    def training_step(self, batch, optimizer):
        x, y = batch
        with self.session.step() as step:
            strike(step.number)
            x = x + self.sigma * torch.randn_like(x)
            loss = torch.nn.functional.mse_loss(self.session.model(x), y)
            step.log(loss=loss, sigma=self.sigma, steps=self.global_step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def validate(self, loader):
        with torch.no_grad():
            total = sum(torch.nn.functional.mse_loss(self.model(x), y) for x, y in loader)
        torch.distributed.all_reduce(total)
        return total.item()


def main():
    init("gloo")
    dataset = TensorDataset(*(each[:64] for each in samples()))
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, seed=2))
    history = History()
    trainer = Trainer(3, [history, EarlyStopping(9), WeightNoise()])
    model = net()
    trainer.fit(model, loader, DataLoader(dataset, batch_size=16))
    end(model=model, history=[history.batches, history.epochs], sigma=trainer.sigma)


if __name__ == "__main__":
    main()
