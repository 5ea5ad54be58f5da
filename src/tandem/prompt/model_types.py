"""Which tokenizer class transformers 5.19 (and vLLM 0.32) gives a model type.

Data, compared with the installed transformers by a test. Model types that are not listed are registered with
no class, or with one that this package does not know; then the class stated in the model's files decides.
"""

from collections.abc import Mapping

# Classes that take tokenizer.json as it is.
AS_FILED = frozenset(
    {
        "TokenizersBackend",
        "PreTrainedTokenizer",
        "PythonBackend",
        "MistralCommonBackend",
    }
)

# The class in these models' files is known to be wrong; transformers uses the registered one.
STATED_CLASS_IS_WRONG = frozenset(
    {"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"}
)

_REGISTERED: Mapping[str, str] = {
    "TokenizersBackend": """
        EvollaModel arctic aria bigbird_pegasus camembertv2-base canary chameleon chatlm cohere_asr
        deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
        deepseek_vl_hybrid deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe
        glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode granite granitemoe
        granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 jamba janus
        kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpmv minicpmv4_6
        minicpmv4_7 minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 nystromformer olmo2
        olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct
        smolvlm stablelm step3_vl step3p5 step3p7 umt5 unlimited-ocr unlimited_ocr vipllava xlm-roberta-xl
    """,
    # Only with the mistral format, which vLLM switches off for its "hf" tokenizers.
    "MistralCommonBackend": "ministral ministral3 mistral mistral3 mixtral pixtral voxtral voxtral_realtime",
    "Qwen2Tokenizer": """
        audioflamingo3 colqwen2 cosmos3_omni fun_asr_nano hunyuan_vl internvl lighton_ocr ovis2 qianfan_ocr
        qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next
        qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice
    """,
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPT2Tokenizer": """
        blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo
        jais2 opt phi starcoder2
    """,
    "GemmaTokenizer": """
        diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2
        t5gemma zaya
    """,
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "LlamaTokenizer": "idefics idefics2",
}

_BY_MODEL_TYPE = {model: name for name, models in _REGISTERED.items() for model in models.split()}


def tokenizer_class(model_type: str) -> str:
    """The registered class; "" where none is listed."""
    return _BY_MODEL_TYPE.get(model_type, "")
