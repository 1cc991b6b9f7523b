// Prints what the build's own headers say about every struct that crosses into Python, as JSON. The worker compares it
// with the binding's ctypes before it trusts a library: a struct that grew a field shifts everything after it silently.

#include "llama.h"

#include <stddef.h>
#include <stdio.h>

static const char * between = "";

#define STRUCT(type) \
    printf("%s\n    \"%s\": {\"size\": %zu, \"fields\": {", between, #type, sizeof(struct type)); \
    between = "";
#define FIELD(type, name) \
    printf("%s\"%s\": %zu", between, #name, offsetof(struct type, name)); \
    between = ", ";
#define END \
    printf("}}"); \
    between = ",";
#define CONSTANT(name) \
    printf("%s\n    \"%s\": %lld", between, #name, (long long) name); \
    between = ",";

int main(void) {
    printf("{\n  \"structs\": {");
    STRUCT(llama_token_data)
        FIELD(llama_token_data, id)
        FIELD(llama_token_data, logit)
        FIELD(llama_token_data, p)
    END
    STRUCT(llama_token_data_array)
        FIELD(llama_token_data_array, data)
        FIELD(llama_token_data_array, size)
        FIELD(llama_token_data_array, selected)
        FIELD(llama_token_data_array, sorted)
    END
    STRUCT(llama_batch)
        FIELD(llama_batch, n_tokens)
        FIELD(llama_batch, token)
        FIELD(llama_batch, embd)
        FIELD(llama_batch, pos)
        FIELD(llama_batch, n_seq_id)
        FIELD(llama_batch, seq_id)
        FIELD(llama_batch, logits)
    END
    STRUCT(llama_model_kv_override)
        FIELD(llama_model_kv_override, tag)
        FIELD(llama_model_kv_override, key)
    END
    STRUCT(llama_model_tensor_override)
        FIELD(llama_model_tensor_override, pattern)
        FIELD(llama_model_tensor_override, type)
    END
    STRUCT(llama_model_imatrix_data)
        FIELD(llama_model_imatrix_data, name)
        FIELD(llama_model_imatrix_data, data)
        FIELD(llama_model_imatrix_data, size)
    END
    STRUCT(llama_model_params)
        FIELD(llama_model_params, devices)
        FIELD(llama_model_params, tensor_buft_overrides)
        FIELD(llama_model_params, n_gpu_layers)
        FIELD(llama_model_params, split_mode)
        FIELD(llama_model_params, load_mode)
        FIELD(llama_model_params, lazy_mode)
        FIELD(llama_model_params, main_gpu)
        FIELD(llama_model_params, tensor_split)
        FIELD(llama_model_params, progress_callback)
        FIELD(llama_model_params, progress_callback_user_data)
        FIELD(llama_model_params, kv_overrides)
        FIELD(llama_model_params, vocab_only)
        FIELD(llama_model_params, check_tensors)
        FIELD(llama_model_params, use_extra_bufts)
        FIELD(llama_model_params, no_host)
        FIELD(llama_model_params, no_alloc)
        FIELD(llama_model_params, load_mtp)
    END
    STRUCT(llama_context_params)
        FIELD(llama_context_params, n_ctx)
        FIELD(llama_context_params, n_batch)
        FIELD(llama_context_params, n_ubatch)
        FIELD(llama_context_params, n_seq_max)
        FIELD(llama_context_params, n_rs_seq)
        FIELD(llama_context_params, n_outputs_max)
        FIELD(llama_context_params, n_outputs_max_per_seq)
        FIELD(llama_context_params, n_threads)
        FIELD(llama_context_params, n_threads_batch)
        FIELD(llama_context_params, ctx_type)
        FIELD(llama_context_params, rope_scaling_type)
        FIELD(llama_context_params, pooling_type)
        FIELD(llama_context_params, attention_type)
        FIELD(llama_context_params, flash_attn_type)
        FIELD(llama_context_params, rope_freq_base)
        FIELD(llama_context_params, rope_freq_scale)
        FIELD(llama_context_params, yarn_ext_factor)
        FIELD(llama_context_params, yarn_attn_factor)
        FIELD(llama_context_params, yarn_beta_fast)
        FIELD(llama_context_params, yarn_beta_slow)
        FIELD(llama_context_params, yarn_orig_ctx)
        FIELD(llama_context_params, defrag_thold)
        FIELD(llama_context_params, cb_eval)
        FIELD(llama_context_params, cb_eval_user_data)
        FIELD(llama_context_params, type_k)
        FIELD(llama_context_params, type_v)
        FIELD(llama_context_params, abort_callback)
        FIELD(llama_context_params, abort_callback_data)
        FIELD(llama_context_params, embeddings)
        FIELD(llama_context_params, offload_kqv)
        FIELD(llama_context_params, no_perf)
        FIELD(llama_context_params, op_offload)
        FIELD(llama_context_params, swa_full)
        FIELD(llama_context_params, kv_unified)
        FIELD(llama_context_params, samplers)
        FIELD(llama_context_params, n_samplers)
        FIELD(llama_context_params, ctx_other)
    END
    STRUCT(llama_model_quantize_params)
        FIELD(llama_model_quantize_params, nthread)
        FIELD(llama_model_quantize_params, ftype)
        FIELD(llama_model_quantize_params, output_tensor_type)
        FIELD(llama_model_quantize_params, token_embedding_type)
        FIELD(llama_model_quantize_params, allow_requantize)
        FIELD(llama_model_quantize_params, quantize_output_tensor)
        FIELD(llama_model_quantize_params, only_copy)
        FIELD(llama_model_quantize_params, pure)
        FIELD(llama_model_quantize_params, keep_split)
        FIELD(llama_model_quantize_params, dry_run)
        FIELD(llama_model_quantize_params, imatrix)
        FIELD(llama_model_quantize_params, kv_overrides)
        FIELD(llama_model_quantize_params, tt_overrides)
        FIELD(llama_model_quantize_params, prune_layers)
        FIELD(llama_model_quantize_params, max_buf_size)
    END
    STRUCT(llama_logit_bias)
        FIELD(llama_logit_bias, token)
        FIELD(llama_logit_bias, bias)
    END
    STRUCT(llama_chat_message)
        FIELD(llama_chat_message, role)
        FIELD(llama_chat_message, content)
    END
    STRUCT(llama_sampler_chain_params)
        FIELD(llama_sampler_chain_params, no_perf)
    END
    STRUCT(llama_perf_context_data)
        FIELD(llama_perf_context_data, t_start_ms)
        FIELD(llama_perf_context_data, t_load_ms)
        FIELD(llama_perf_context_data, t_p_eval_ms)
        FIELD(llama_perf_context_data, t_eval_ms)
        FIELD(llama_perf_context_data, n_p_eval)
        FIELD(llama_perf_context_data, n_eval)
        FIELD(llama_perf_context_data, n_reused)
    END
    STRUCT(ggml_tensor)
        FIELD(ggml_tensor, type)
        FIELD(ggml_tensor, buffer)
        FIELD(ggml_tensor, ne)
        FIELD(ggml_tensor, nb)
        FIELD(ggml_tensor, op)
        FIELD(ggml_tensor, op_params)
        FIELD(ggml_tensor, flags)
        FIELD(ggml_tensor, src)
        FIELD(ggml_tensor, view_src)
        FIELD(ggml_tensor, view_offs)
        FIELD(ggml_tensor, data)
        FIELD(ggml_tensor, name)
        FIELD(ggml_tensor, extra)
    END
    printf("\n  },\n  \"constants\": {");
    between = "";
    CONSTANT(GGML_MAX_DIMS)
    CONSTANT(GGML_MAX_SRC)
    CONSTANT(GGML_MAX_NAME)
    CONSTANT(GGML_MAX_OP_PARAMS)
    CONSTANT(GGML_TYPE_COUNT)
    CONSTANT(GGML_OP_COUNT)
    CONSTANT(GGML_OP_MUL_MAT)
    CONSTANT(GGML_OP_FLASH_ATTN_EXT)
    printf("\n  }\n}\n");
    return 0;
}
