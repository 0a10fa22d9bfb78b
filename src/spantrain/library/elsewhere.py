"""Names that others' trainers have and this one cannot have, with what to do; most are the transformers library's."""

from collections.abc import Mapping
from types import MappingProxyType

_BATCH = "devices are not alike, so the planner shares samples out; say train_batch_size, the samples of a step"
_EVALUATION = "held-out samples are shared out as those of training are; leave it out"
_LOADING = "samples are read on the devices that need them, in an order that every plan has; leave it out"
_PLACES = "the plan says what runs where; leave it out"
_LINES = "lines go to standard error every logging_steps, and every step into metrics.jsonl; leave it out"
_HUB = "nothing is uploaded; `spantrain export RUN --to FOLDER`, then `huggingface-cli upload`, leave it out here"
_PRECISION = "bf16 and fp16 say what is computed with, in training and evaluation; leave it out"
_COMMANDS = "it is for scripts with a command line of their own; call what is wanted, and leave it out"
_MODEL = "the model runs as its factory returns it; do it there, and leave it out"
_SAVING = "a checkpoint has all that a run needs to go on, in each device's own file; leave it out"
_CALLBACKS = "metrics are of all samples, as they were passed; leave it out"

_REASONS: Mapping[str, tuple[str, ...]] = {
    _BATCH: (
        "per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps",
        "auto_find_batch_size",
    ),
    _EVALUATION: ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps"),
    _LOADING: (
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "ignore_data_skip",
        "train_sampling_strategy", "group_by_length", "length_column_name", "remove_unused_columns", "label_names",
    ),
    _PLACES: (
        "deepspeed", "fsdp", "fsdp_config", "fsdp_min_num_params", "accelerator_config", "parallelism_config",
        "local_rank",
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
        "ddp_timeout", "use_cpu", "no_cuda", "average_tokens_across_devices", "torch_empty_cache_steps",
    ),
    _LINES: (
        "logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "logging_dir",
        "log_level",
        "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics", "debug",
        "include_tokens_per_second",
    ),
    _HUB: (
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    ),
    _PRECISION: ("bf16_full_eval", "fp16_full_eval", "tf32", "half_precision_backend", "fp16_opt_level"),
    _COMMANDS: ("do_train", "do_eval", "do_predict"),
    _MODEL: (
        "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config",
        "use_cache", "neftune_noise_alpha", "label_smoothing_factor", "optim_target_modules",
    ),
    _SAVING: (
        "save_only_model", "save_on_each_node", "save_safetensors", "enable_jit_checkpoint",
        "restore_callback_states_from_checkpoint",
    ),
    _CALLBACKS: (
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics",
        "include_inputs_for_metrics", "batch_eval_metrics",
    ),
    "a run is evaluated before its first step in any case, and then every eval_steps; leave it out": (
        "eval_on_start", "eval_delay",
    ),
    "the same seed gives the same run already; leave it out": ("full_determinism",),
    "a unit is computed again as a whole; leave it out": (
        "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
    ),
    "it is called gradient_checkpointing": ("activation_checkpointing",),
    "it is called eval_strategy": ("evaluation_strategy",),
}  # fmt: skip
ELSEWHERE: Mapping[str, str] = MappingProxyType({name: why for why, names in _REASONS.items() for name in names})
