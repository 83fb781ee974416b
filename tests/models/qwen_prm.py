"""A small Qwen2.5-Math-PRM, whose code is not in transformers: its folder, and what it computes."""

import json

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2Model


class QwenPRM(torch.nn.Module):
    """The network of transformers, and the two layers of the head."""

    def __init__(self, vocab_size: int):
        super().__init__()
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2,
        )  # fmt: skip
        self.model = Qwen2Model(config)
        self.score = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, tokens):
        """The logits `[N,T,2]` of tokens `[N,T]`."""
        with torch.inference_mode():
            return self.score(self.model(torch.tensor(tokens)).last_hidden_state).numpy()

    def write(self, folder):
        """Its folder as its own code writes it, which has a head of tokens too."""
        self.model.save_pretrained(folder)
        tensors = {**self.state_dict(), "lm_head.weight": torch.ones(self.model.config.vocab_size, 32)}
        save_file(tensors, folder / "model.safetensors")
        entries = json.loads((folder / "config.json").read_text())
        entries["architectures"] = ["Qwen2ForProcessRewardModel"]
        entries["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
        (folder / "config.json").write_text(json.dumps(entries))
