// config.json: what is read, what is refused, and the way back.
#include "engine/model/config.h"

#include "engine/files/json_fields.h"
#include "engine/model/rope.h"
#include "tests/engine_model/model_rig.h"
#include "tests/fails_with.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

using ::testing::HasSubstr;

constexpr char kLlama32[] = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "vocab_size": 128256})";

TEST(ModelConfig, ReadsAPublishedFile) {
  auto config = must(parse_model_config(kLlama32));
  EXPECT_EQ(config.hidden_size, 2048);
  EXPECT_EQ(config.num_kv_heads, 8);
  EXPECT_EQ(config.rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(config.rope_scaling.factor, 32.0);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{128001, 128008, 128009}));
  EXPECT_EQ(config.num_parameters(), 1235814400u);  // as published: 1.23 B
  const KvGeometry geometry = config.kv_geometry();
  EXPECT_EQ(geometry.token_bytes(), 16u * 2 * 8 * 64 * 2);
  EXPECT_EQ(geometry.block_bytes(), 2u * 8 * 64 * 16 * 2);
  EXPECT_EQ(geometry.blocks_for(17), 2u);
}

TEST(ModelConfig, RoundTripsThroughJson) {
  std::vector<ModelConfig> configs = family_configs();
  for (ModelConfig config : {*parse_model_config(kLlama32), tiny_model_config()}) {
    for (const auto kind : {RopeScaling::Kind::kNone, RopeScaling::Kind::kLinear,
                            RopeScaling::Kind::kLlama3, RopeScaling::Kind::kYarn}) {
      config.rope_scaling = {.kind = kind,
                             .factor = 2,
                             .low_freq_factor = 1,
                             .high_freq_factor = 8,
                             .original_max_position_embeddings = 512};
      configs.push_back(config);
    }
  }
  for (const ModelConfig& config : configs) {
    const std::string json = model_config_to_json(config);
    auto again = must(parse_model_config(json));
    EXPECT_EQ(model_config_to_json(again), json);
    EXPECT_EQ(again.eos_token_ids, config.eos_token_ids);
    EXPECT_EQ(again.family, config.family);
    EXPECT_EQ(again.num_parameters(), config.num_parameters());
    for (int l = 0; l < config.num_layers; ++l) {
      EXPECT_EQ(again.window(l), config.window(l));
      EXPECT_EQ(again.has_experts(l), config.has_experts(l));
    }
  }
}

constexpr char kSizes[] = R"("hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
  "num_hidden_layers": 3, "vocab_size": 100, "max_position_embeddings": 32768,)";

ModelConfig parsed(const std::string& fields) {
  return must(parse_model_config("{" + std::string(kSizes) + fields + "}"));
}

TEST(ModelConfig, ReadsTheWindowsOfEachFamily) {
  const std::string mistral = R"("model_type": "mistral", "num_key_value_heads": 2, )";
  EXPECT_EQ(parsed(mistral + R"("sliding_window": 4096)").window(2), 4096);
  EXPECT_EQ(parsed(mistral + R"("sliding_window": null)").window(2), 0);
  EXPECT_EQ(parsed(mistral + R"("rms_norm_eps": 1e-5)").window(2), 4096);  // as transformers has it
  const std::string qwen = R"("model_type": "qwen2", "sliding_window": 512, )";
  EXPECT_EQ(parsed(qwen + R"("max_window_layers": 1)").window(2), 0);
  const ModelConfig from_one =
      parsed(qwen + R"("use_sliding_window": true, "max_window_layers": 1)");
  EXPECT_EQ(from_one.window(0), 0);
  EXPECT_EQ(from_one.window(1), 512);
  const ModelConfig by_type = parsed(qwen + R"("use_sliding_window": true,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"])");
  EXPECT_EQ(by_type.window(0), 512);
  EXPECT_EQ(by_type.window(2), 0);
}

constexpr char kQwen3Moe[] = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
  "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
  "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
  "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
  "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
  "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
  "vocab_size": 151936})";
constexpr char kMixtral[] = R"({
  "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
  "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
  "vocab_size": 32000})";

TEST(ModelConfig, ReadsPublishedFilesOfExperts) {
  auto qwen = must(parse_model_config(kQwen3Moe));
  EXPECT_EQ(qwen.num_experts, 128);
  EXPECT_EQ(qwen.experts_per_token, 8);
  EXPECT_EQ(qwen.expert_size, 768);
  EXPECT_TRUE(qwen.norm_topk_prob && qwen.has_experts(0) && qwen.has_experts(47));
  EXPECT_EQ(qwen.window(0), 0);
  EXPECT_EQ(qwen.num_parameters(), 30532122624u);  // as published: 30.5 B
  auto mixtral = must(parse_model_config(kMixtral));
  EXPECT_EQ(mixtral.num_experts, 8);
  EXPECT_EQ(mixtral.expert_size, 14336);
  EXPECT_EQ(mixtral.num_parameters(), 46702792704u);  // as published: 46.7 B
}

TEST(ModelConfig, FillsInWhatFilesOfExpertsLeaveOut) {
  const std::string heads = R"("hidden_size": 128, "num_attention_heads": 8, )";
  const ModelConfig qwen = parsed(heads + R"("model_type": "qwen3_moe")");
  EXPECT_EQ(qwen.num_experts, 128);
  EXPECT_EQ(qwen.experts_per_token, 8);
  EXPECT_EQ(qwen.expert_size, 768);
  EXPECT_EQ(qwen.num_kv_heads, 4);
  EXPECT_EQ(qwen.head_dim, 16);
  EXPECT_EQ(qwen.rope_theta, 10000.0);
  EXPECT_EQ(qwen.rms_norm_eps, 1e-6);
  EXPECT_EQ(qwen.window(0), 0);
  EXPECT_FALSE(qwen.norm_topk_prob);
  EXPECT_TRUE(qwen.has_qk_norm());
  const ModelConfig mixtral = parsed(heads + R"("model_type": "mixtral")");
  EXPECT_EQ(mixtral.num_experts, 8);
  EXPECT_EQ(mixtral.experts_per_token, 2);
  EXPECT_EQ(mixtral.expert_size, 128);
  EXPECT_EQ(mixtral.num_kv_heads, 8);
  EXPECT_EQ(mixtral.rope_theta, 1000000.0);
  EXPECT_EQ(mixtral.rms_norm_eps, 1e-5);
  EXPECT_EQ(mixtral.window(0), 0);
  EXPECT_TRUE(mixtral.norm_topk_prob);
  EXPECT_FALSE(mixtral.has_qk_norm());
}

TEST(ModelConfig, KnowsWhichLayersHaveExperts) {
  const std::string qwen = R"("model_type": "qwen3_moe", "num_key_value_heads": 2, )";
  const auto layers = [&](const std::string& fields) {
    const ModelConfig config = parsed(qwen + fields);
    std::string has;
    for (int l = 0; l < config.num_layers; ++l) has += config.has_experts(l) ? 'x' : '-';
    return has;
  };
  EXPECT_EQ(layers(R"("mlp_only_layers": null)"), "xxx");
  EXPECT_EQ(layers(R"("mlp_only_layers": [0])"), "-xx");
  EXPECT_EQ(layers(R"("decoder_sparse_step": 2)"), "-x-");
  EXPECT_EQ(layers(R"("decoder_sparse_step": 2, "mlp_only_layers": [1, 1])"), "---");
  // Either name, and windows that all layers have, whatever older keys say.
  EXPECT_EQ(parsed(qwen + R"("num_local_experts": 16)").num_experts, 16);
  EXPECT_EQ(parsed(qwen + R"("num_local_experts": 16, "num_experts": 16)").num_experts, 16);
  const ModelConfig windows =
      parsed(qwen + R"("use_sliding_window": true, "max_window_layers": 2)");
  EXPECT_EQ(windows.window(0), 4096);
  EXPECT_EQ(windows.window(2), 4096);
}

TEST(ModelConfig, RefusesExpertsThatCannotBe) {
  const struct {
    const char* fields;
    const char* says;
  } cases[] = {
      {R"("num_experts": 0)", "num_experts"},
      {R"("num_experts": 1000000000000)", "num_experts"},
      {R"("num_experts": 22000)", "between 1 and 21845 in 3 layers"},
      {R"("num_experts": "8")", "num_experts"},
      {R"("num_experts": 8, "num_local_experts": 16)", "num_local_experts\" is 16"},
      {R"("num_experts": 4)", "num_experts_per_tok is 8"},
      {R"("num_experts_per_tok": 0)", "num_experts_per_tok"},
      {R"("num_experts_per_tok": 129)", "num_experts_per_tok is 129"},
      {R"("moe_intermediate_size": 40)", "moe_intermediate_size is 40"},
      {R"("moe_intermediate_size": 16000000)", "moe_intermediate_size"},
      {R"("norm_topk_prob": 1)", "norm_topk_prob"},
      {R"("decoder_sparse_step": 0)", "decoder_sparse_step"},
      {R"("mlp_only_layers": 1)", "mlp_only_layers"},
      {R"("mlp_only_layers": [3])", "mlp_only_layers"},
      {R"("mlp_only_layers": [-1])", "mlp_only_layers"},
      {R"("mlp_only_layers": [true])", "mlp_only_layers"},
      {R"("mlp_bias": true)", "mlp_bias"},
      {R"("use_sliding_window": true, "sliding_window": 64,
          "layer_types": ["full_attention", "sliding_attention", "full_attention"])",
       "layer_types"},
  };
  for (const auto& c : cases) {
    const auto config = parse_model_config(
        "{" + std::string(kSizes) + R"("model_type": "qwen3_moe", "num_key_value_heads": 2, )" +
        c.fields + "}");
    ASSERT_FALSE(config.ok()) << c.fields;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(c.says));
  }
  ModelConfig dense = tiny_model_config();
  dense.num_experts = 8;
  EXPECT_THAT(std::string(dense.validate().message()), HasSubstr("num_experts"));
  ModelConfig mixtral = tiny_mixtral_config();
  mixtral.norm_topk_prob = false;
  EXPECT_FALSE(mixtral.validate().ok());
}

TEST(ModelConfig, KnowsWhatAFamilyHas) {
  const ModelConfig qwen2 = parsed(R"("model_type": "qwen2")");
  EXPECT_TRUE(qwen2.has_qkv_bias() && !qwen2.has_output_bias() && !qwen2.has_qk_norm());
  const ModelConfig qwen3 = parsed(R"("model_type": "qwen3")");
  EXPECT_TRUE(!qwen3.has_qkv_bias() && qwen3.has_qk_norm());
  EXPECT_EQ(qwen3.head_dim, 128);
  const ModelConfig llama = parsed(R"("model_type": "llama", "attention_bias": true)");
  EXPECT_TRUE(llama.has_qkv_bias() && llama.has_output_bias() && !llama.mlp_bias);
}

// The numbers of transformers 5 (modeling_rope_utils.py) for 16 dimensions, theta 10000.
TEST(Rope, FrequenciesAreTransformers) {
  ModelConfig config = tiny_model_config();
  config.rope_scaling = {
      .kind = RopeScaling::Kind::kYarn, .factor = 4, .original_max_position_embeddings = 128};
  const std::vector<double> expected = {1.0,    0.2371708,    0.05,    0.007905695,
                                        0.0025, 0.0007905695, 0.00025, 7.905695e-05};
  const std::vector<double> actual = rope_frequencies(config);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 1e-6 * expected[i]) << i;
  }
  const ModelConfig read =
      parsed(R"("model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0})");
  EXPECT_NEAR(read.rope_scaling.attention_factor, 1.138629436111989, 1e-9);
  EXPECT_EQ(read.rope_scaling.original_max_position_embeddings, 32768);
}

TEST(ModelConfig, FillsInWhatOlderFilesLeaveOut) {
  auto config = must(parse_model_config(
      R"({"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,
          "num_attention_heads":4,"vocab_size":100,"max_position_embeddings":64,
          "rope_scaling":null,"eos_token_id":2})"));
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.bos_token_id, -1);
}

TEST(ModelConfig, ReadsTheNewerNameOfRopeSettings) {
  std::string json = model_config_to_json(tiny_model_config());
  json.insert(json.find('{') + 1,
              R"("rope_parameters":{"rope_type":"default","rope_theta":12345.0},)");
  auto config = must(parse_model_config(json));
  EXPECT_EQ(config.rope_theta, 12345.0);
}

// The file with one field replaced.
std::string with(const char* field, const char* value) {
  auto json = *parse_json(model_config_to_json(tiny_model_config()), "test");
  json[field] = *parse_json(value, "test");
  return json.dump();
}

TEST(ModelConfig, RefusesWhatItCannotRunAndNamesTheField) {
  const struct {
    const char* field;
    const char* value;
    const char* says;
  } cases[] = {
      {"model_type", "\"gpt2\"", "gpt2"},
      {"model_type", "7", "model_type"},
      {"hidden_act", "\"gelu\"", "gelu"},
      {"mlp_bias", "7", "mlp_bias"},
      {"sliding_window", "4096", "sliding_window"},
      {"layer_types", "[\"full_attention\"]", "layer_types"},
      {"layer_types", "[\"full_attention\",\"linear_attention\"]", "linear_attention"},
      {"layer_types", "[\"full_attention\",\"sliding_attention\"]", "sliding_window"},
      {"quantization_config", "{\"quant_method\":\"awq\"}", "quantization_config"},
      {"partial_rotary_factor", "0.5", "partial_rotary_factor"},
      {"hidden_size", "-32", "hidden_size"},
      {"hidden_size", "33", "hidden_size"},
      {"hidden_size", "1e9", "hidden_size"},
      {"hidden_size", "\"32\"", "hidden_size"},
      {"num_hidden_layers", "100000", "num_hidden_layers"},
      {"num_attention_heads", "0", "num_attention_heads"},
      {"num_key_value_heads", "3", "num_key_value_heads"},
      {"head_dim", "20", "head_dim"},
      {"vocab_size", "99999999999999999999", "vocab_size"},
      {"rope_scaling", "{\"rope_type\":\"longrope\",\"factor\":2.0}", "longrope"},
      {"rope_scaling", "{\"rope_type\":\"yarn\",\"beta_fast\":true}", "beta_fast"},
      {"rope_scaling", "[1]", "rope_scaling"},
      {"rope_scaling", "{\"rope_type\":\"llama3\",\"high_freq_factor\":1.0}", "high_freq_factor"},
      {"eos_token_id", "[1,\"a\"]", "eos_token_id"},
      {"eos_token_id", "100000", "eos_token_id"},
      {"rms_norm_eps", "true", "rms_norm_eps"},
  };
  for (const auto& c : cases) {
    auto config = parse_model_config(with(c.field, c.value));
    ASSERT_FALSE(config.ok()) << c.field << " " << c.value;
    EXPECT_THAT(config.status(), fails_with(Code::kInvalidArgument, {c.says}));
  }
}

TEST(ModelConfig, RefusesWhatIsNotJson) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("nul"), std::string("[]"), std::string("{}"),
        std::string(100000, '['), std::string("{\"a\":1e999}"), std::string("\xff\xfe{}")}) {
    EXPECT_FALSE(parse_model_config(text).ok()) << text.substr(0, 10);
  }
  const std::string whole = model_config_to_json(tiny_model_config());
  for (size_t cut = 0; cut + 2 < whole.size(); ++cut) {
    EXPECT_FALSE(parse_model_config(whole.substr(0, cut)).ok()) << cut;
  }
}

}  // namespace
}  // namespace baton::engine
