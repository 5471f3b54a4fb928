// config.json: what is read, what is refused, and the way back.
#include "engine/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "engine/files/json_fields.h"
#include "engine/model/test_model.h"

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
  auto config = parse_model_config(kLlama32);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->hidden_size, 2048);
  EXPECT_EQ(config->num_kv_heads, 8);
  EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(config->rope_scaling.factor, 32.0);
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{128001, 128008, 128009}));
  EXPECT_EQ(config->num_parameters(), 1235814400u);  // as published: 1.23 B
  const KvGeometry geometry = config->kv_geometry();
  EXPECT_EQ(geometry.token_bytes(), 16u * 2 * 8 * 64 * 2);
  EXPECT_EQ(geometry.block_bytes(), 2u * 8 * 64 * 16 * 2);
  EXPECT_EQ(geometry.blocks_for(17), 2u);
}

TEST(ModelConfig, RoundTripsThroughJson) {
  for (ModelConfig config : {*parse_model_config(kLlama32), tiny_model_config()}) {
    for (const auto kind :
         {RopeScaling::Kind::kNone, RopeScaling::Kind::kLinear, RopeScaling::Kind::kLlama3}) {
      config.rope_scaling = {.kind = kind,
                             .factor = 2,
                             .low_freq_factor = 1,
                             .high_freq_factor = 8,
                             .original_max_position_embeddings = 512};
      const std::string json = model_config_to_json(config);
      auto again = parse_model_config(json);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(model_config_to_json(*again), json);
      EXPECT_EQ(again->eos_token_ids, config.eos_token_ids);
    }
  }
}

TEST(ModelConfig, FillsInWhatOlderFilesLeaveOut) {
  auto config = parse_model_config(
      R"({"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,
          "num_attention_heads":4,"vocab_size":100,"max_position_embeddings":64,
          "rope_scaling":null,"eos_token_id":2})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_kv_heads, 4);
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->rope_theta, 10000.0);
  EXPECT_EQ(config->bos_token_id, -1);
}

TEST(ModelConfig, ReadsTheNewerNameOfRopeSettings) {
  std::string json = model_config_to_json(tiny_model_config());
  json.insert(json.find('{') + 1,
              R"("rope_parameters":{"rope_type":"default","rope_theta":12345.0},)");
  auto config = parse_model_config(json);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope_theta, 12345.0);
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
      {"attention_bias", "true", "attention_bias"},
      {"sliding_window", "4096", "sliding_window"},
      {"hidden_size", "-32", "hidden_size"},
      {"hidden_size", "33", "hidden_size"},
      {"hidden_size", "1e9", "hidden_size"},
      {"hidden_size", "\"32\"", "hidden_size"},
      {"num_hidden_layers", "100000", "num_hidden_layers"},
      {"num_attention_heads", "0", "num_attention_heads"},
      {"num_key_value_heads", "3", "num_key_value_heads"},
      {"head_dim", "20", "head_dim"},
      {"vocab_size", "99999999999999999999", "vocab_size"},
      {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":2.0}", "yarn"},
      {"rope_scaling", "[1]", "rope_scaling"},
      {"rope_scaling", "{\"rope_type\":\"llama3\",\"high_freq_factor\":1.0}", "high_freq_factor"},
      {"eos_token_id", "[1,\"a\"]", "eos_token_id"},
      {"eos_token_id", "100000", "eos_token_id"},
      {"rms_norm_eps", "true", "rms_norm_eps"},
  };
  for (const auto& c : cases) {
    auto config = parse_model_config(with(c.field, c.value));
    ASSERT_FALSE(config.ok()) << c.field << " " << c.value;
    EXPECT_TRUE(absl::IsInvalidArgument(config.status()));
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(c.says));
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
