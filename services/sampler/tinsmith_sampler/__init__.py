"""The sampler service: one engine replica, the adapters it holds, and the work it pulls."""
