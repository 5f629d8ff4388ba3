"""`--help` in groups: the long list of options under headings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

_SAMPLING = (
    "n_predict temperature top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold dynatemp_range "
    "dynatemp_exponent repetition_penalty penalty_last_n presence_penalty frequency_penalty dry_multiplier dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers adaptive_target adaptive_decay mirostat mirostat_eta "
    "mirostat_tau samplers ignore_eos seed json_schema guided_choice grammar compact_json stop"
)

GROUPS: Mapping[str, str] = {
    "Input and output": "prompts file images sounds as_chat as_json output errors column id_column template endpoint "
    "raw system save_to continue_from ordered longest_first retry_failed overwrite",
    "Model": "model hf_repo hf_file mmproj mmproj_auto lora chat_template template_variables reasoning thinking_tokens "
    "thinking_budget pooling",
    "Batch and memory": "n_parallel n_ctx n_batch n_ubatch prefix_cache prefix_cache_ram prefix_cache_disk "
    "ctx_checkpoints checkpoint_min_step swa_full swap_space cache_type_k cache_type_v context_shift n_keep "
    "memory_check",
    "Speed": "n_threads n_gpu_layers use_profile kv_layout flash_attn repack sampling prefer target_itl_ms "
    "max_wait_ms deterministic",
    "Speculative decoding": "spec draft_max draft_model draft_gpu_layers",
    "Several models": "models_dir models_config llama_cpp_python_config models_max models_memory models_autoload "
    "any_model",
    "Workers and devices": "workers downscale_delay devices rpc tensor_split ray_address replicas step_timeout "
    "sleep_idle_seconds in_process",
    "Network and keys": "url api_key hosts port api_keys api_key_file ssl_certfile ssl_keyfile cors_origins "
    "allowed_hosts",
    "Limits": "max_queue max_concurrent max_concurrent_per_key request_timeout idle_timeout drain_timeout max_tokens "
    "max_n max_prompts_per_batch max_body_mb max_file_mb max_media max_media_mb",
    "Names, files and endpoints": "aliases tags strict_model data_dir slot_save_path allowed_media_domains media_path "
    "metrics slots props webui",
    "Sampling": _SAMPLING,
    "Log and debugging": "log_level access_log log_format verbose trace",
}
"""Headings with the names of their options' parameters, in the order in which `--help` shows them."""

_OTHERS = "Other options"


class GroupedCommand(click.Command):
    """A command whose `--help` shows its options under the headings of `GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each heading."""
        for heading, options in grouped(self.get_params(ctx)):
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def grouped(options: Iterable[click.Parameter]) -> Iterator[tuple[str, list[click.Parameter]]]:
    """Yields each heading with its options, in the order of `GROUPS`, and last the options that are in none."""
    left = {option.name: option for option in options}
    for heading, names in GROUPS.items():
        yield heading, [left.pop(name) for name in names.split() if name in left]
    yield _OTHERS, list(left.values())
