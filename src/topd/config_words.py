"""Names of settings in other trainers, and the key that an unknown word may stand for."""

import difflib
from collections.abc import Sequence

ALSO_CALLED = {
    "trainer.learning_rate": "lr actor_lr",
    "trainer.epochs": "num_train_epochs num_epochs num_iterations ppo_epochs",
    "trainer.minibatch_prompts": "batch_size mini_batch_size minibatch_size ppo_mini_batch_size train_batch_size "
    "per_device_train_batch_size",
    "trainer.max_tokens_per_microbatch": "micro_batch_size microbatch_size gradient_accumulation_steps",
    "trainer.warmup_updates": "warmup warmup_steps num_warmup_steps",
    "trainer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "trainer.max_grad_norm": "grad_clip clip_grad gradient_clip gradient_clipping max_norm",
    "trainer.dtype": "bf16 fp16 precision mixed_precision",
    "rollout.prompts_per_step": "batch_size rollout_batch_size num_prompts prompts_per_batch",
    "rollout.group_size": "num_generations num_samples n rollouts_per_prompt samples_per_prompt",
    "rollout.max_completion_tokens": "max_tokens max_length max_new_tokens max_completion_length max_response_length max_seq_len",
    "rollout.engine": "backend use_vllm",
    "task.max_prompt_tokens": "max_prompt_length",
    "task.type": "dataset dataset_name environment env",
    "task.path": "data train_file train_data",
    "algorithm.type": "algo loss loss_type method",
    "algorithm.clip": "epsilon clip_range cliprange clip_eps",
    "student.name": "model model_name model_path model_name_or_path",
    "student.lora.rank": "r lora_r lora_rank",
    "student.lora.alpha": "lora_alpha",
    "teacher.name": "teacher_model teacher_name teacher_model_name_or_path",
    "teacher.base_url": "url api_base endpoint server",
    "eval.every_steps": "eval_steps eval_every interval",
    "eval.samples_per_problem": "k num_samples n",
    "run.directory": "output output_dir dir save_dir",
    "run.steps": "max_steps total_steps num_steps iterations",
    "run.checkpoint_every": "save_steps save_every",
    "run.keep_checkpoints": "save_total_limit",
    "run.resume": "resume_from_checkpoint",
    "run.trackers": "report_to wandb tracker",
}
"""Key -> the words for it elsewhere. A word of several keys means the one of the section that it stands in, or the first."""

SECTIONS = {
    "student": "model actor policy",
    "teacher": "reference ref",
    "task": "data dataset env environment",
    "rollout": "sampling generation inference vllm",
    "algorithm": "algo loss",
    "trainer": "training train optim optimizer",
    "eval": "evaluation validation",
    "run": "logging checkpoint output",
}

NOT_HERE = dict.fromkeys(
    ("kl_coef", "kl_beta", "kl_loss_coef", "init_kl_coef", "beta"),
    "There is no penalty against a reference model: the teacher is what keeps the student near (algorithm.alpha).",
)
"""Settings of others that topd has not, and what takes their place."""


def hint(dotted: str, keys: Sequence[str], *, is_section: bool) -> str:
    """Suggestion for an unknown key, as a sentence with a space before it; "" if nothing is near."""
    section, _, name = dotted.rpartition(".")
    if is_section and not section:
        known = [word for word, others in SECTIONS.items() if name in others.split()]
        near = known or difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.6)
        return f" Did you mean the section [{near[0]}]?" if near else f" The sections are {', '.join(SECTIONS)}."
    if name in NOT_HERE:
        return f" {NOT_HERE[name]}"
    meant = [key for key, words in ALSO_CALLED.items() if name in words.split()]
    here = [f"{section}.{key.rpartition('.')[2]}" for key in meant]
    same = sorted((key for key in keys if key.rpartition(".")[2] == name), key=lambda key: key.count("."))
    inside = [key for key in same if section and key.startswith(f"{section}.")]
    beside = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    close = [beside[word] for word in difflib.get_close_matches(name, beside, n=1, cutoff=0.6)]
    far = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.8)
    best = [key for key in (*inside, *here, *meant, *same, *close, *far) if key in keys]
    return f" Did you mean '{best[0]}'?" if best else ""
