"""Families that are not served, and what each would need: state of kinds that no chain keeps yet."""

from __future__ import annotations

_STREAMS = (
    "Its hyper-connections carry several streams a token, which is no obstacle: they look at one token at a time."
)

MISSING = {
    "glm5_next_text": (
        "its indexer scores pools of index_kpool tokens in place of tokens, from keys and gates that it keeps of every "
        "token, and adds the pool that is not full yet to every choice; its attention has no positions. It needs a "
        "chooser over pools beside the one over tokens in attention/indexer.py, and Kimi Delta Attention with a lower "
        f"bound on its gates. {_STREAMS}"
    ),
    "deepseek_v4": (
        "its layers attend over a window and, in one softmax with sinks, over keys that a gated sum makes of every few "
        "tokens (all of them, or those that an indexer chooses), each softened by the tokens of the pool before. It "
        "needs a chain that keeps a window, the pool that is not full yet and the compressed keys together, with the "
        f"gradient of a pool cut by the end of a piece handed to the piece before. {_STREAMS}"
    ),
    "qwen4_exp_text": (
        "its attention chooses blocks of tokens by keys averaged over each, and some layers add embeddings of hashed "
        "n-grams of the last token ids, behind a dilated convolution. It needs a chooser over blocks, a chain of token "
        "ids and one of a dilated convolution's tail, and rotary tables of all positions so far for the blocks' keys; "
        f"its GatedDeltaNet layers are served. {_STREAMS}"
    ),
    "llama4_text": (
        "its chunked attention starts anew every attention_chunk_size tokens, which its mask alone says: the attention "
        "call does not. It needs a chain that forgets at a chunk's end"
    ),
    "gemma3n_text": (
        "its layers predict and correct several streams, and share keys and values. It needs the last as in "
        "models/gemma.py, and a comparison of the rest"
    ),
}
"""`model_type` to what is missing, for the message that refuses it."""
