"""The checkpointer: makes parts in the blob store a checkpoint, all or nothing."""
