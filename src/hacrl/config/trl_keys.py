"""The keys of `trl grpo` (TRL 1.16: GRPOConfig, ModelConfig, script and data arguments), and what they are called here.

The tables are data: `from_trl.py` translates a file with them, and errors about unknown keys look here too.
"""

SAME = (
    *("learning_rate", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "gradient_checkpointing", "num_iterations", "max_completion_length", "max_prompt_length"),
    *("temperature", "top_p", "top_k", "chat_template_kwargs", "mask_truncated_completions", "num_generations"),
    *(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min")),
    *("trust_remote_code", "save_total_limit", "report_to", "seed", "output_dir"),
)
"""Keys with our name and meaning."""

RENAMED: dict[str, tuple[str, str]] = {
    "model_name_or_path": ("agents.model", "list two or more models to learn together"),
    "dtype": ("dtype", "float32 or bfloat16: precision of the computation; trained weights are float32 in either case"),
    "bf16": ("dtype", "true is bfloat16; trained weights are float32 in either case"),
    "use_cpu": ("device", "true is cpu"),
    "optim": ("optimizer", "adamw or adamw_8bit"),
    "use_vllm": ("engine", "true is vllm"),
    "vllm_gpu_memory_utilization": ("vllm.gpu_memory_utilization", "needs engine: vllm"),
    "vllm_max_model_length": ("vllm.max_model_len", "needs engine: vllm"),
    "vllm_enable_sleep_mode": ("vllm.enable_sleep_mode", "on by default, where vLLM shares a GPU with its agent"),
    "dataset_name": ("task.train", "a file, a folder or a hub id"),
    "dataset_config": ("task.subset", "for data of the hub"),
    "dataset_train_split": ("task.train_split", "for data of the hub"),
    "dataset_test_split": ("task.eval_split", "for data of the hub, with task.eval"),
    "reward_funcs": ("task.reward", "exact, math, module:function, or a list"),
    "reward_weights": ("task.reward", "written into the list, as {name, weight}"),
    "importance_sampling_level": ("algorithm.name", "token is grpo, sequence is gspo"),
    "beta": ("algorithm.beta", "on own rollouts, without TRL's use_bias_correction_kl"),
    "epsilon": (
        "algorithm.epsilon",
        "of tokens for grpo, of whole answers for all others: about a thousand times less",
    ),
    "epsilon_high": ("algorithm.epsilon_high", "TRL's default is epsilon"),
    "loss_type": ("algorithm.loss_type", "grpo, bnpo, dapo, dr_grpo or cispo"),
    "scale_rewards": ("algorithm.scale_rewards", "group, batch or none"),
    "entropy_coef": ("algorithm.entropy_coef", ""),
    "use_peft": ("lora", "a section: lora: {r: 16, alpha: 32}"),
    "lora_r": ("lora.r", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_target_modules": ("lora.target_modules", "leave it out for all linear layers"),
    "per_device_train_batch_size": (
        "rollouts_per_update",
        "per_device_train_batch_size x gradient_accumulation_steps x processes; micro_batch_size bounds one pass",
    ),
    "gradient_accumulation_steps": ("rollouts_per_update", "passes are divided to fit into memory by themselves"),
    "generation_batch_size": ("prompts_per_step", "divided by num_generations"),
    "steps_per_generation": (
        "prompts_per_step",
        "steps_per_generation x per_device_train_batch_size / num_generations",
    ),
    "max_steps": ("max_steps", "TRL counts updates; a step here is one round of sampling with all its updates"),
    "num_train_epochs": ("max_steps", "epochs x rows of the data / prompts_per_step"),
    "warmup_steps": ("warmup_steps", "TRL counts updates; here they are steps"),
    "warmup_ratio": ("warmup_steps", "no longer a key of TRL; ratio x max_steps"),
    "save_steps": ("save_every", "TRL counts updates; here they are steps"),
    "save_strategy": ("save_every", "no is 0, which saves at the end only"),
    "eval_steps": ("eval_every", "TRL counts updates; here they are steps"),
    "eval_strategy": ("eval_every", "needs task.eval"),
    "vllm_importance_sampling_cap": ("vllm_importance_sampling_clip_max", "its old name in TRL too"),
}
"""Keys whose name, place or unit differs: what ours is called, and how to get its value."""

LEFT_OUT: dict[str, str] = {
    "every step writes all metrics to metrics.jsonl, and all answers to the folder of the run": """
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
        log_level_replica disable_tqdm include_num_input_tokens_seen log_completions log_multimodal
        num_completions_to_print log_unique_prompts include_for_metrics skip_memory_metrics debug""",
    "trackers are called by output_dir": """
        run_name project trackio_space_id trackio_bucket_id trackio_static_space_id""",
    "training sends nothing to the hub; hacrl export RUN AGENT --push-to-hub ORG/NAME does, afterwards": """
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        log_completions_hub_repo""",
    "a checkpoint always holds everything, and hacrl train RUN --resume continues from it": """
        save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip resume_from_checkpoint
        restore_callback_states_from_checkpoint""",
    "keep_best: true keeps the checkpoint with the best held-out accuracy": """
        load_best_model_at_end metric_for_best_model greater_is_better""",
    "held-out problems are answered greedily at the start, every eval_every steps and at the end": """
        eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
        eval_use_gather_object eval_accumulation_steps batch_eval_metrics bf16_full_eval fp16_full_eval do_train do_eval
        do_predict""",
    "eval_samples says how many answers to each held-out problem are sampled": "num_generations_eval",
    "float32 and bfloat16 are offered": "fp16 tf32",
    "another way to sample would need its own log-probabilities: temperature, top_p and top_k are offered": """
        min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex""",
    "the built-in sampler has its own cache; sampling_batch_size bounds its memory": """
        cache_implementation use_cache use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged pad_to_multiple_of torch_empty_cache_steps""",
    "vLLM runs inside hacrl; options of vllm.LLM go into the section vllm": """
        vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
        vllm_server_timeout vllm_group_port vllm_tensor_parallel_size""",
    "importance sampling corrects for a sampler that differs from the learner": "off_policy_mask_threshold",
    "this objective is not offered here": """
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
        multi_objective_aggregation top_entropy_quantile use_adaptive_entropy entropy_coef_min entropy_coef_max
        entropy_coef_delta entropy_target router_aux_loss_coef label_smoothing_factor neftune_noise_alpha""",
    "there is no second bound of the ratio; algorithm.delta of hacpo is something else": "delta",
    "the KL divergence is not weighted by the ratio": "use_bias_correction_kl",
    "the reference is always the starting model": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "models do not call tools here": "max_tool_calling_iterations",
    "a reward is a function, not a model": "reward_model_name_or_path",
    "the optimizer is AdamW with the options above": """
        optim_args optim_target_modules lr_scheduler_kwargs auto_find_batch_size average_tokens_across_devices""",
    "hacrl has its own decoder, compiled and packed where that helps": """
        torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config attn_implementation
        gradient_checkpointing_kwargs disable_dropout cast_lm_head_to_fp32 model_init_kwargs full_determinism""",
    "one agent uses one device, or fsdp: N processes, and Ray several machines (docs/scaling.md)": """
        fsdp fsdp_config deepspeed ds3_gather_for_generation ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank accelerator_config
        parallelism_config""",
    "data are read whole and shuffled with seed": """
        shuffle_dataset data_seed dataset_streaming streaming dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
        train_sampling_strategy length_column_name test_split_size""",
    "download another revision of a model into a folder and name that": "model_revision",
    "LoRA here has rank, alpha and target_modules": """
        lora_dropout lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora""",
    "models are not quantized": """
        load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage""",
    "several data sets are the parts of task.mixture, each with its reward": "datasets",
    "it has no use here": "ignore_bias_buffers",
}
"""Why keys are not taken over."""

REASONS: dict[str, str] = {key: reason for reason, keys in LEFT_OUT.items() for key in keys.split()}
"""Why each of these keys is not taken over."""

TRL_KEYS: tuple[str, ...] = (*SAME, *RENAMED, *REASONS)

DEFAULTS: dict[str, object] = {
    "bf16": True,
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "epsilon": 0.2,
    "lr_scheduler_type": "linear",
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_train_epochs": 3.0,
    "save_steps": 500,
    "seed": 42,
}
"""TRL's defaults that matter: those that differ from ours, or that other settings are computed from."""


def trl_advice(key: str) -> str | None:
    """What a key of TRL is called here, as the end of a message about an unknown key; None for other keys."""
    if key in RENAMED:
        ours, note = RENAMED[key]
        return f"; TRL's {key} is {ours} here{f': {note}' if note else ''}"
    return f"; TRL's {key} has no place here: {REASONS[key]}" if key in REASONS else None
