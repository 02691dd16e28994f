"""A ClientApp that knows nothing of Perennial, as Flower's quickstart-pytorch template writes it: a model, a
train and an evaluate function, the whole state dict back."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

app = ClientApp()


class Net(nn.Module):
    """Small enough for a test, with an integer buffer as BatchNorm has."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def load_data(partition_id: int) -> tuple[Tensor, Tensor]:
    """Three classes that differ in their mean; each partition has its own samples."""
    generator = torch.Generator().manual_seed(partition_id)
    labels = torch.arange(60) % 3
    centres = torch.eye(3, 4) * 3
    return centres[labels] + torch.randn(60, 4, generator=generator), labels


def train_fn(net: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> float:
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for rows in torch.arange(len(y)).split(20):
            optimizer.zero_grad()
            loss = criterion(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (3 * epochs)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    x, y = load_data(int(context.node_config["partition-id"]))
    train_loss = train_fn(model, x, y, 1, 0.05)
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    model.eval()
    x, y = load_data(int(context.node_config["partition-id"]))
    with torch.no_grad():
        right = (model(x).argmax(dim=1) == y).float().mean().item()
    metrics = MetricRecord({"eval_acc": right, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
