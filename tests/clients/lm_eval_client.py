"""Score texts of a cluster with lm-eval's own client: `lm_eval_client.py URL MODEL FILE`. Runs where that is installed.

FILE holds pairs of context and continuation as token ids; what comes out is their log probabilities, as JSON.
"""

import json
import sys
from pathlib import Path

from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model, file = sys.argv[1:]
client = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model=model, tokenizer_backend=None, batch_size=2)
client.tokenizer, client.tokenized_requests = client, True  # one is asked for; token ids need none
pairs = json.loads(Path(file).read_text())
found = client._loglikelihood_tokens([(("", ""), context, continuation) for context, continuation in pairs])
sys.stdout.write(json.dumps(found))
