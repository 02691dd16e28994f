"""A ClientApp that knows nothing of Perennial, as Flower's quickstart-sklearn template writes it: a logistic
regression of scikit-learn, whose `coef_` lies in Fortran order after a fit."""

import warnings

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

SITES, CLASSES, FEATURES = 5, 10, 64
app = ClientApp()


def model_with(weights: list[np.ndarray]) -> LogisticRegression:
    model = LogisticRegression(max_iter=3, warm_start=True)
    model.classes_ = np.arange(CLASSES)
    model.coef_, model.intercept_ = weights
    return model


def first_weights() -> list[np.ndarray]:
    return [np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)]


def load_data(partition_id: int) -> tuple[np.ndarray, np.ndarray]:
    """One of SITES parts of the digits; SITES itself: the part that nobody trains on."""
    x, y = load_digits(return_X_y=True)
    part = np.random.default_rng(0).permutation(len(y)) % (SITES + 1) == partition_id
    return x[part] / 16, y[part]


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Fit the model to local data."""
    model = model_with(msg.content.array_records["arrays"].to_numpy_ndarrays())
    x, y = load_data(int(context.node_config["partition-id"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ConvergenceWarning)
        model.fit(x, y)
    assert np.isfortran(model.coef_), "the case that this client is here for"
    content = RecordDict(
        {
            "arrays": ArrayRecord([model.coef_, model.intercept_]),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=msg)
