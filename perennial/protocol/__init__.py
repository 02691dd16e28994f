"""What crosses the wire, and nothing else: typed messages to and from Flower's RecordDict."""
