"""The in-process engine: the same ServerApp and ClientApp on one machine, without Ray or sockets."""
