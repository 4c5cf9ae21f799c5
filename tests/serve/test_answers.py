"""The shape of answers, where it depends on numbers that a tiny model does not give."""

import math

import torch

from tests.fakes import EOS, make_model
from topd.models.logprobs import RankedLogprobs, Tokens
from topd.serve.answers import LOWEST, Spelling, completion_answer, to_json
from topd.serve.guard import error_response
from topd.serve.prefixes import SharedPrefixes
from topd.serve.protocol import ApiError, CompletionRequest
from topd.serve.work import CompletionJob, PromptInput, Scoring
from topd.serve.worker import Scored

PROMPT = (5, EOS, 6, 7)
LOGPROBS = torch.tensor([-0.5, -math.inf, -2.0])


MODEL = make_model()


def answered(**request):
    """The one choice of an echo of PROMPT, whose third token cannot be."""
    asked = CompletionRequest(prompt=list(PROMPT), max_tokens=0, echo=True, **request)
    prefix, tail = PROMPT[:1], PROMPT[1:]
    shared = SharedPrefixes(groups=(Tokens(prefix, (tail,)),), parts=(((0, 0),),))
    top = torch.tensor([[0.0, -0.5, -math.inf]] * 3)
    ranked = RankedLogprobs(LOGPROBS, torch.tensor([1, 3, 2]), torch.tensor([[EOS, 8, 9], [8, 9, 6], [8, 9, 2]]), top)
    job = CompletionJob(
        request=asked,
        prompts=(PromptInput(text=None, token_ids=PROMPT),),
        shared=shared,
        scoring=Scoring(groups=shared.groups, top_k=3),
        sampling=((),),
    )
    scored = Scored(logprobs=((LOGPROBS,),), ranked=((ranked,),), fingerprint="f")
    [choice] = completion_answer(job, scored, [[]], model=MODEL, name="m", spelling=Spelling(MODEL.tokenizer))["choices"]
    to_json(choice)
    return choice


def test_minus_infinity_is_written_as_a_number_everywhere():
    choice = answered(logprobs=3, prompt_logprobs=3)
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, LOWEST, -2.0]
    assert choice["logprobs"]["top_logprobs"][1] == {"<eos>": -0.5, "6": -0.5, "7": LOWEST}
    assert choice["prompt_logprobs"][2]["6"] == {"logprob": LOWEST, "rank": 3, "decoded_token": "4"}


def test_no_more_of_the_most_likely_are_shown_than_each_form_asks_for():
    choice = answered(logprobs=2, prompt_logprobs=1)
    assert [list(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [
        [],
        ["<eos>", "6"],
        ["4", "6", "7"],
        ["5", "6", "7"],
    ]
    assert [list(top or ()) for top in choice["prompt_logprobs"]] == [[], ["1"], ["6", "8"], ["7", "8"]]


def test_offsets_count_the_characters_of_every_token():
    assert answered(logprobs=0)["logprobs"]["text_offset"] == [0, 1, 6, 7]


def test_an_error_says_how_long_to_stay_away():
    assert error_response(ApiError(429, "full", retry_after=12)).headers["Retry-After"] == "12"
    assert "Retry-After" not in error_response(ApiError(400, "no")).headers
    assert error_response(ApiError(401, "who")).headers["WWW-Authenticate"] == "Bearer"
