"""Whether a Flower process serves, by its own health server (gRPC health checking protocol)."""

from perennial.foundation.errors import StateError


def check_health(address: str) -> None:
    """Ask a Flower process's own health server. Raises StateError when it does not serve."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(  # pyright: ignore[reportAttributeAccessIssue]
                health_pb2.HealthCheckRequest(), timeout=5
            )
        except grpc.RpcError as error:
            raise StateError(f"{address}: no health answer; the process is not running or stuck") from error
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise StateError(f"{address}: answers that it does not serve")
