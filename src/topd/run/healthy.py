"""Healthy ranges of the metrics of run/catalogue.py, the meaning of values outside, and advice."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """The verdict on a usual value: one title inside the range, one outside, and a sentence.

    The sentence may use {value}, {percent}, {over} (the steps), {expected} (the range) and {setting}.
    """

    inside: str
    outside: str
    words: str
    severe: float = math.inf
    """Values above are bad, not only a warning."""
    setting: str = ""
    largest: bool = False
    """True if the largest step is the evidence, not the usual value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """Expected values of a metric over several steps; one step outside means little.

    Inside is low <= value <= high. `words` say what numbers cannot; `source` says where the range comes from. `outside` and
    `advice` may tell cases apart ("Rising: lower this. Falling: raise that."); `of_case` takes one out.
    """

    low: float | None = None
    high: float | None = None
    words: str = ""
    source: str = "rule of thumb"
    outside: str
    advice: str
    says: Says | None = None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def expected(self) -> str:
        """Range and words as one phrase."""
        bounds = [f"at least {self.low:g}"] if self.low is not None else []
        bounds += [f"at most {self.high:g}" if self.high else "0"] if self.high is not None else []
        return "; ".join(filter(None, [" and ".join(bounds), self.words]))


def of_case(text: str, case: str) -> str:
    """The part of a text about one case; all of it without a case. Raises KeyError if it does not know the case."""
    if not case:
        return text
    part = re.search(rf"(?:^|\. ){re.escape(case)}: (.*?)(?:\.$|\. (?=[A-Z][\w ]*: ))", text)
    if part is None:
        raise KeyError(f"{case} in: {text}")
    return part[1][0].upper() + part[1][1:] + "."


HEALTHY: Mapping[str, Healthy] = {
    "grade/mean": Healthy(
        words="rises, or stays high",
        source="arXiv 2603.25562",
        outside="Falling: training diverges, or the teacher prefers completions that are wrong (it may be unreliable after the "
        "student's beginnings). Always 0: nothing is right yet, or the grader reads another format.",
        advice="Falling: compare the teacher's own accuracy; lower trainer.learning_rate. Always 0: read stored completions "
        "with task.answer_pattern in mind.",
    ),
    "grade/std_in_group": Healthy(
        low=0.01,
        words="matters only where credit comes from grades",
        outside="All completions of a prompt earn the same grade, so grades give no signal.",
        advice="Take problems of another difficulty (task), or raise rollout.group_size.",
    ),
    "grade/grader_errors": Healthy(
        high=0.0,
        source="a grader should never raise",
        outside="The grader raised; these completions got grade 0, right or not.",
        advice="Look at task.answer_pattern and task.grader; see the grader's input in the stored rollouts.",
    ),
    "token_reward/mean": Healthy(
        words="rises towards 0 as the gap closes",
        outside="Falling: the student moves away from the teacher.",
        advice="As for teacher/gap.",
    ),
    "token_reward/floor_share": Healthy(
        high=0.2,
        source="docs/results.md: real runs start at 0.09 to 0.16 and end at 0.03",
        outside="The teacher rejects many tokens. A bounded reward cannot tell them apart; an unbounded one is ruled by them.",
        advice="Bring the pair closer first (demonstrations with algorithm.type = sft); check the end tokens with topd probe.",
        says=Says(
            inside="Few tokens are rejected",
            outside="The teacher rejects many tokens",
            words="{percent} of the tokens ({over}) get at most a tenth of the student's probability from the teacher.",
        ),
    ),
    "teacher/gap": Healthy(
        low=-0.01,
        words="falls over the run",
        source="a KL is never negative; noise of a sample aside",
        outside="Rising: the student moves away from the teacher. Not falling: updates are too small or too large, or the "
        "student is as close as it can get. Negative: student and teacher are not scored under the same conditions. Null: the "
        "teacher gives a sampled token probability 0.",
        advice="Rising: lower trainer.learning_rate, or make fewer updates of a step (larger trainer.minibatch_prompts). Not "
        "falling: where importance ratios stay near 1, raise trainer.learning_rate or make more updates of a step (smaller "
        "trainer.minibatch_prompts); where they go far, lower it. Negative: set rollout.temperature and rollout.top_p to 1 and "
        "run topd probe. Null: use a reward with a floor.",
    ),
    "teacher/log_ratio_p01": Healthy(
        low=-10.0,
        words="matters where the reward has no floor",
        source="heavy tail: arXiv 2603.11137, 2606.17199, 2606.01249; the number is a rule of thumb",
        outside="One token in a hundred is e^10 times rarer to the teacher. Without a floor such tokens make the gradient.",
        advice="Use a reward with a floor, or keep trainer.max_grad_norm low.",
    ),
    "teacher/log_ratio_p50": Healthy(
        words="near 0: on most tokens both agree",
        outside="Far below 0: teacher and student disagree on most tokens, so something systematic is wrong.",
        advice="Run topd probe; compare the prompt format with the one that the teacher was trained on (task.template).",
    ),
    "teacher/log_ratio_p99": Healthy(
        high=3.0,
        outside="The student samples tokens that it gives a twentieth of the teacher's probability or less; they are pulled up "
        "hard.",
        advice="Keep algorithm.clip as it is and lower trainer.learning_rate; check rollout.temperature.",
    ),
    "teacher/dropped_groups": Healthy(
        high=0.0,
        outside="Prompts are missing from the step; if the long ones fail, what is learned from is no longer what was asked.",
        advice="Read the teacher's log; raise teacher.timeout_s or teacher.patience_s, or lower teacher.max_concurrent_requests.",
    ),
    "teacher/retries": Healthy(
        high=0.0,
        words="some are harmless",
        outside="The teacher's servers fail or are too slow.",
        advice="Lower teacher.max_concurrent_requests or raise teacher.timeout_s; add a server to teacher.base_url.",
    ),
    "teacher/NAME/gap": Healthy(
        words="falls, for every teacher",
        outside="One domain is not learned, or at the price of the others.",
        advice="Change the share of its prompts in the task; check the domain's teacher.",
    ),
    "token_reward/std_in_group": Healthy(
        words="above 0; shrinks as the gap closes",
        outside="0: no token of a group differs, and normalising makes nothing of it.",
        advice="Check that student.name and teacher.name are different models.",
    ),
    "advantage/degenerate_groups": Healthy(
        high=0.5,
        words="0 with a teacher that differs",
        source="docs/results.md: GRPO runs that learn start near 0.56 and fall",
        outside="Their rollouts are sampled for nothing. From grades: problems too easy or too hard. From a teacher: it agrees "
        "with the student.",
        advice="Take problems of another difficulty (task), or raise rollout.group_size.",
        says=Says(
            inside="Groups carry a signal",
            outside="Most groups carry no signal",
            words="{percent} of the groups have no signal: all their advantages are 0 ({over}).",
        ),
    ),
    "ratio/p01": Healthy(
        low=0.3,
        words="1 with one update a step",
        outside="The policy moves far within one step.",
        advice="As for ratio/clip_share.",
    ),
    "ratio/p99": Healthy(
        high=2.0,
        words="1 with one update a step",
        outside="The policy moves far within one step.",
        advice="As for ratio/clip_share.",
    ),
    "ratio/clip_share": Healthy(
        high=0.2,
        source="rule of thumb of PPO",
        outside="Much of a rollout batch gives no gradient: the policy has left the region that it may move in.",
        advice="Lower trainer.learning_rate, or make fewer updates of a step (larger trainer.minibatch_prompts, fewer "
        "trainer.epochs).",
    ),
    "policy/entropy": Healthy(
        low=0.01,
        words="falls where the teacher is surer; never grows by half",
        source="collapse: arXiv 2603.07079, 2603.11137, 2606.26091; the number is a rule of thumb",
        outside="Near 0: answers become alike, nothing new is sampled. Growing: the policy falls apart.",
        advice="Near 0: compare pass@k before and after, lower trainer.learning_rate, stop earlier (run.steps). Growing: lower "
        "trainer.learning_rate, look at the completions.",
    ),
    "policy/mismatch_kl": Healthy(
        high=0.01,
        source="values here are about 1e-13 in float32 and 0.002 in bfloat16",
        outside="The engine samples from another distribution than the trainer updates: wrong weights, low precision, or cut "
        "sampling.",
        advice="Use student.dtype = float32 or the same dtype in engine and trainer (trainer.dtype); check rollout.top_p and "
        "the served model.",
        says=Says(
            inside="Engine and trainer agree",
            outside="Engine and trainer disagree",
            words="The engine's distribution is {value} nats per token from the trainer's ({over}; {expected}).",
            severe=0.1,
        ),
    ),
    "policy/lag": Healthy(
        words="0; with rollout.max_lag the updates of so many steps",
        outside="Rollouts come from older weights than the settings allow.",
        advice="Set rollout.max_lag to 0, or look for servers that refuse new weights.",
    ),
    "completion/mean_length": Healthy(
        words="goes towards the teacher's own length",
        source="end tokens and length: modelscope/ms-swift#9526, arXiv 2605.31159, 2604.08527",
        outside="Growing: the teacher punishes stopping, or rewards repetition. Shrinking: a shorter style is copied.",
        advice="Growing: run topd probe, set teacher.map_eos where end tokens differ, read the longest completions, lower "
        "trainer.learning_rate. Shrinking: harmless while grades hold; else lower trainer.learning_rate.",
    ),
    "completion/max_length": Healthy(
        words="below rollout.max_completion_tokens",
        outside="At the limit: see completion/truncation_rate.",
        advice="As for completion/truncation_rate.",
    ),
    "completion/truncation_rate": Healthy(
        high=0.05,
        source="arXiv 2604.08527: runs saturate at the limit, then collapse; no early threshold is known; the number is a rule "
        "of thumb",
        outside="Such completions end before their answer: grade 0, and no end token to learn from.",
        advice="Raise rollout.max_completion_tokens; if the length grows from step to step, run topd probe and set "
        "teacher.map_eos.",
        says=Says(
            inside="Few completions are cut off",
            outside="Completions are cut off",
            words="{percent} of the completions were cut off at {setting} tokens ({over}).",
            severe=0.3,
            setting="rollout.max_completion_tokens",
            largest=True,
        ),
    ),
    "train/loss": Healthy(
        words="near 0 and without meaning where advantages are normalised; falls only in fine-tuning",
        outside="In fine-tuning: the learning rate is too high.",
        advice="Lower trainer.learning_rate.",
    ),
    "train/grad_norm": Healthy(
        low=0.001,
        words="steady",
        outside="Almost no gradient: there is no signal, or all of it is clipped.",
        advice="Look at advantage/degenerate_groups and ratio/clip_share; check that student.name and teacher.name are "
        "different models.",
    ),
    "train/grad_norm_max": Healthy(
        words="below ten times the usual train/grad_norm",
        source="spikes: arXiv 2603.11137, 2606.17199, 2606.01249; the number is a rule of thumb",
        outside="One mini-batch makes the step. It is scaled down to trainer.max_grad_norm, but its direction stays.",
        advice="Larger trainer.minibatch_prompts, lower trainer.learning_rate, a reward with a floor.",
    ),
    "seconds/step": Healthy(
        words="steady; grows with length",
        source="marin-community/marin#6218: scoring took 90 to 97 % of a step",
        outside="One phase takes nearly all of it: speeding up another one is wasted.",
        advice="Rollout: rollout.max_concurrent_rollouts, or rollout.engine = vllm. Teacher: teacher.dtype, more servers in "
        "teacher.base_url. Update: trainer.max_tokens_per_microbatch, no trainer.gradient_checkpointing.",
    ),
    "tokens_per_second/rollout": Healthy(
        words="steady, unless completions grow",
        outside="Falling: completions grow, the machine is shared, or memory runs out.",
        advice="Compare completion/mean_length and memory/peak; lower rollout.max_concurrent_rollouts.",
    ),
    "memory/peak": Healthy(
        words="steady after the second step",
        source="NVIDIA-NeMo/RL#2772: the optimizer's state appears with the first update",
        outside="Growing with the longest completion so far, or a leak: it may end in out of memory.",
        advice="Lower trainer.max_tokens_per_microbatch or rollout.max_concurrent_rollouts; set "
        "trainer.gradient_checkpointing; limit rollout.max_completion_tokens.",
    ),
}
