"""The Megatron engine: megatron-core's model, schedules and gradient buffers under the same `Engine` protocol."""
