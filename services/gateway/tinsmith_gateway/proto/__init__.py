"""The protobuf messages of the protocol; generated, see ``tinsmith_wire.proto``."""
