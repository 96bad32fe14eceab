"""Boxes around bright rectangles: images of unequal size, a list of targets each, a collate that pads."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rectangles(Dataset):
    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        height, width = torch.randint(24, 49 if index % 50 else 81, (2,), generator=generator).tolist()
        image, boxes = 0.3 * torch.randn(3, height, width, generator=generator), []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            x, y = (int(torch.randint(0, side - 8, (), generator=generator)) for side in (width, height))
            image[:, y : y + 8, x : x + 8] += 1
            boxes.append([x, y, x + 8, y + 8])
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.ones(len(boxes)).long()}


def collate_fn(samples):
    images, targets = zip(*samples, strict=True)
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    padded = torch.zeros(len(images), 3, height // 8 * 8 + 8, width // 8 * 8 + 8)
    for place, image in zip(padded, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return padded, list(targets)


class Detector(nn.Module):
    """One cell of 8 × 8 says whether a box has its middle there, and where its corners are."""

    def __init__(self, width=16):
        super().__init__()
        layers, last = [], 3
        for size in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(last, size, 3, stride=2, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
            last = size
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(last, 5, 3, padding=1)

    def forward(self, images, targets):
        found = self.head(self.body(images)).movedim(1, 3)
        wanted, boxes = torch.zeros_like(found[..., 0]), torch.zeros_like(found[..., 1:])
        for number, target in enumerate(targets):
            centres = (target["boxes"].unflatten(1, (2, 2)).mean(1) / 8).long()
            wanted[number, centres[:, 1], centres[:, 0]] = 1
            boxes[number, centres[:, 1], centres[:, 0]] = target["boxes"] / 8 - centres.repeat(1, 2)
        there = nn.functional.binary_cross_entropy_with_logits(found[..., 0], wanted)
        where = nn.functional.smooth_l1_loss(found[..., 1:][wanted == 1], boxes[wanted == 1])
        return {"loss_objectness": there, "loss_box": where}


def train(batch_size, lr, report, epochs=50):
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        loader = DataLoader(Rectangles(1000, 0), batch_size, shuffle=True, drop_last=True, collate_fn=collate_fn)
        for images, targets in loader:
            losses = sum(model(images, targets).values())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model, collate = Detector, collate_fn


def train_dataset():
    return Rectangles(1000, 0)


def val_dataset():
    return Rectangles(100, 10_000)


def compute_loss(model, batch):
    return sum(model(*batch).values())


def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
