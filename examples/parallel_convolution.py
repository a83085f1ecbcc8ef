"""A convolutional net in VGG's style whose pictures are split over the workers in space.

python examples/parallel_convolution.py
torchrun --nproc-per-node 2 examples/parallel_convolution.py
mpirun -n 4 python examples/parallel_convolution.py

Each worker has a part of every activation and fetches the rows and columns around it that its
kernels see. The numbers are the same on any number of workers.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import allstep
from allstep.comm.autograd import gather
from allstep.nn import Conv2d, Grid, Layout, MaxPool2d, Window

EPOCHS = 4
BATCH = 50
SIDE = 16
CHANNELS = ((8, 8), (16, 16))  # of the convolutions before each pooling


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images)[:, None] / 16
    return interpolate(images, (SIDE, SIDE), mode="bilinear"), torch.tensor(digits.target)


def convolutions(grid: Grid, layout: Layout) -> tuple[nn.Sequential, Layout]:
    """Blocks of convolutions and a pooling, and who owns what of the result."""
    layers: list[nn.Module] = []
    in_channels = 1
    for block in CHANNELS:
        for out_channels in block:
            seed = len(layers)  # the same weights on any grid
            conv = Conv2d(grid, layout, in_channels, out_channels, 3, padding=1, seed=seed)
            layers += [conv, nn.ReLU()]
            layout, in_channels = conv.out_layout, out_channels
        pool = MaxPool2d(grid, layout, 2)
        layers.append(pool)
        layout = pool.out_layout
    return nn.Sequential(*layers).double(), layout


def classifier(layout: Layout) -> nn.Linear:
    torch.manual_seed(0)
    num_positions = Window.whole(layout.shape).num_positions
    return nn.Linear(CHANNELS[-1][-1] * num_positions, 10, dtype=torch.float64)


class SplitNet:
    """Convolutions on all workers; the classifier, which needs the whole picture, on rank 0."""

    def __init__(self, comm: allstep.Communicator) -> None:
        self.grid = Grid(comm)  # (2, 2) on four workers
        self.in_layout = self.grid.split((SIDE, SIDE))
        self.convolutions, self.out_layout = convolutions(self.grid, self.in_layout)
        self.classifier = classifier(self.out_layout).to(comm.device)

    def parameters(self) -> list[nn.Parameter]:
        own = list(self.convolutions.parameters())
        return own + (list(self.classifier.parameters()) if self.grid.rank == 0 else [])

    def __call__(self, images: Tensor) -> Tensor:
        """Logits on rank 0; elsewhere what `backward` must be called on."""
        rows, columns = self.in_layout.windows[self.grid.rank].slices(Window.whole((SIDE, SIDE)))
        parts = gather(self.grid.comm, self.convolutions(images[:, :, rows, columns]))
        if isinstance(parts, Tensor):
            return parts
        whole = parts[0].new_empty(*parts[0].shape[:2], *self.out_layout.shape)
        for part, window in zip(parts, self.out_layout.windows, strict=True):
            whole[(..., *window.slices(Window.whole(self.out_layout.shape)))] = part
        return self.classifier(whole.flatten(1))


def train(comm: allstep.Communicator) -> tuple[float, float]:
    """Test accuracy and the parameters' norm, on rank 0."""
    x, y = (tensor.to(comm.device) for tensor in data())
    net = SplitNet(comm)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)  # the same order on every worker
        for batch in torch.randperm(1500, generator=generator).split(BATCH):
            out = net(x[batch])
            loss = cross_entropy(out, y[batch]) if comm.rank == 0 else out
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        out = net(x[1500:])
    if comm.rank != 0:
        return 0.0, 0.0
    accuracy = (out.argmax(1) == y[1500:]).double().mean().item()
    norm = torch.cat([p.detach().flatten() for p in net.parameters()]).norm().item()
    return accuracy, norm


def main() -> None:
    with allstep.init() as comm:
        accuracy, norm = train(comm)
        if comm.rank == 0:
            print(f"test accuracy {accuracy:.4f}, parameters' norm {norm:.9f}")


if __name__ == "__main__":
    main()
