// Hugging Face directories: names, round trips, shards, other number types, missing pieces.
#include "engine/model/checkpoint.h"

#include <nlohmann/json.hpp>

#include "engine/files/files.h"
#include "engine/files/safetensors.h"
#include "engine/kernels/aligned.h"
#include "engine/model/model.h"
#include "tests/engine_model/model_rig.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine {
namespace {

using ::testing::HasSubstr;

class CheckpointTest : public ::testing::Test {
 protected:
  std::string error() const {
    auto checkpoint = load_checkpoint(folder_);
    EXPECT_FALSE(checkpoint.ok());
    return checkpoint.ok() ? "" : std::string(checkpoint.status().message());
  }
  void write_config(const ModelConfig& config) const {
    const std::string json = model_config_to_json(config);
    ASSERT_TRUE(write_file_atomically(folder_ + "/config.json", json).ok());
  }
  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path("checkpoint");  // not there yet
};

// A tensor as the files write it; `values` instead of the weight's own, of another type.
TensorToWrite as_written(const Weight& weight, TensorType type, std::span<const std::byte> values) {
  std::vector<size_t> shape = {size_t(weight.rows), size_t(weight.cols)};
  if (weight.is_vector) shape = {size_t(weight.cols)};
  return {weight.name, type, shape, values};
}
TensorToWrite as_written(const Weight& weight) {
  return as_written(weight, TensorType::kBf16, std::as_bytes(std::span(weight.data)));
}

TEST_F(CheckpointTest, NamesAndShapesAreHuggingFaces) {
  const auto list = [](const ModelConfig& config) {
    std::vector<std::string> out;
    for (const Weight& w : weight_list(config)) {
      out.push_back(absl::StrCat(w.name, " ", w.rows, "x", w.cols));
    }
    return out;
  };
  ModelConfig llama = tiny_model_config();
  llama.tie_word_embeddings = false;
  std::vector<std::string> names = list(llama);
  EXPECT_EQ(names.size(), 3u + 2 * 9);
  EXPECT_EQ(names[0], "model.embed_tokens.weight 272x32");
  EXPECT_THAT(names, ::testing::IsSupersetOf({"model.layers.0.input_layernorm.weight 1x32",
                                              "model.layers.0.self_attn.q_proj.weight 32x32",
                                              "model.layers.1.self_attn.k_proj.weight 16x32",
                                              "model.layers.1.self_attn.v_proj.weight 16x32",
                                              "model.layers.1.self_attn.o_proj.weight 32x32",
                                              "model.layers.1.post_attention_layernorm.weight 1x32",
                                              "model.layers.1.mlp.gate_proj.weight 64x32",
                                              "model.layers.1.mlp.up_proj.weight 64x32",
                                              "model.layers.1.mlp.down_proj.weight 32x64",
                                              "model.norm.weight 1x32", "lm_head.weight 272x32"}));
  ModelConfig config = tiny_qwen3_moe_config();  // the first layer is dense
  names = list(config);
  EXPECT_EQ(names.size(), 2u + 11 + 9 + 6 * 3);
  EXPECT_THAT(names, ::testing::IsSupersetOf({"model.layers.0.mlp.gate_proj.weight 64x32",
                                              "model.layers.1.mlp.gate.weight 6x32",
                                              "model.layers.1.mlp.experts.5.gate_proj.weight 48x32",
                                              "model.layers.1.mlp.experts.0.up_proj.weight 48x32",
                                              "model.layers.1.mlp.experts.3.down_proj.weight 32x48",
                                              "model.layers.1.self_attn.q_norm.weight 1x16"}));
  names = list(tiny_mixtral_config());
  EXPECT_EQ(names.size(), 2u + 2 * (7 + 4 * 3));
  EXPECT_THAT(names, ::testing::IsSupersetOf(
                         {"model.layers.1.block_sparse_moe.gate.weight 4x32",
                          "model.layers.0.block_sparse_moe.experts.3.w1.weight 64x32",
                          "model.layers.0.block_sparse_moe.experts.2.w3.weight 64x32",
                          "model.layers.1.block_sparse_moe.experts.0.w2.weight 32x64"}));
  // Whatever layers have, each is found.
  config.num_layers = 4;
  config.dense_layers = {false, true, true, false};
  config.tie_word_embeddings = false;
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  EXPECT_EQ(checkpoint.layer(2, kDown).name, "model.layers.2.mlp.down_proj.weight");
  EXPECT_EQ(checkpoint.layer(3, kRouter).name, "model.layers.3.mlp.gate.weight");
  EXPECT_EQ(checkpoint.layer(3, kKeyNorm).name, "model.layers.3.self_attn.k_norm.weight");
  EXPECT_EQ(checkpoint.experts(0)[1 * kPerExpert + kExpertUp].name,
            "model.layers.0.mlp.experts.1.up_proj.weight");
  EXPECT_EQ(checkpoint.experts(3)[5 * kPerExpert + kExpertDown].name,
            "model.layers.3.mlp.experts.5.down_proj.weight");
  EXPECT_EQ(checkpoint.experts(3).size(), 6u * 3);
  EXPECT_EQ(checkpoint.final_norm().name, "model.norm.weight");
  EXPECT_EQ(checkpoint.lm_head().name, "lm_head.weight");
}

TEST_F(CheckpointTest, NamesTheExpertThatIsMissing) {
  Checkpoint checkpoint = make_test_checkpoint(tiny_mixtral_config(), 3);
  std::erase_if(checkpoint.weights, [](const Weight& weight) {
    return weight.name == "model.layers.1.block_sparse_moe.experts.2.w3.weight";
  });
  ASSERT_TRUE(save_checkpoint(folder_, checkpoint, nullptr).ok());
  EXPECT_THAT(error(), HasSubstr("model.layers.1.block_sparse_moe.experts.2.w3.weight"));
  EXPECT_TRUE(absl::IsInvalidArgument(Model::create(checkpoint).status()));
}

TEST_F(CheckpointTest, SavesAndLoadsTheSameBits) {
  for (const bool tied : {true, false}) {
    ModelConfig config = tiny_model_config();
    config.tie_word_embeddings = tied;
    const Checkpoint saved = make_test_checkpoint(config, 3);
    const Tokenizer tokenizer = make_test_tokenizer();
    ASSERT_TRUE(save_checkpoint(folder_, saved, &tokenizer).ok());
    auto loaded = must(load_checkpoint(folder_));
    ASSERT_EQ(loaded.weights.size(), saved.weights.size());
    for (size_t i = 0; i < saved.weights.size(); ++i) {
      EXPECT_EQ(loaded.weights[i].data, saved.weights[i].data) << saved.weights[i].name;
    }
    EXPECT_EQ(model_config_to_json(loaded.config), model_config_to_json(config));
    EXPECT_TRUE(Tokenizer::load(folder_ + "/tokenizer.json").ok());
    EXPECT_TRUE(Model::load(folder_).ok());
    for (const char* name : {"generation_config.json", "tokenizer_config.json"}) {
      EXPECT_TRUE(std::filesystem::exists(folder_ + "/" + name)) << name;
    }
  }
}

TEST_F(CheckpointTest, LoadsShardsAndWiderNumbers) {
  const Checkpoint saved = make_test_checkpoint(tiny_model_config(), 3);
  ASSERT_TRUE(save_checkpoint(folder_, saved, nullptr).ok());
  std::filesystem::remove(folder_ + "/model.safetensors");
  std::vector<std::vector<float>> wide;
  std::vector<TensorToWrite> shards[2];
  for (size_t i = 0; i < saved.weights.size(); ++i) {
    const Weight& weight = saved.weights[i];
    if (i % 2 == 0) {
      shards[0].push_back(as_written(weight));
      continue;
    }
    wide.emplace_back();
    for (const uint16_t bits : weight.data) wide.back().push_back(float_from_bf16(bits));
    shards[1].push_back(
        as_written(weight, TensorType::kF32, std::as_bytes(std::span(wide.back()))));
  }
  std::string map;
  for (int s = 0; s < 2; ++s) {
    const std::string name = "model-0000" + std::to_string(s + 1) + "-of-00002.safetensors";
    ASSERT_TRUE(write_safetensors(folder_ + "/" + name, shards[s]).ok());
    for (const TensorToWrite& tensor : shards[s]) {
      map += (map.empty() ? "\"" : ",\"") + tensor.name + "\":\"" + name + "\"";
    }
  }
  ASSERT_TRUE(write_file_atomically(folder_ + "/model.safetensors.index.json",
                                    "{\"metadata\":{},\"weight_map\":{" + map + "}}")
                  .ok());
  auto loaded = must(load_checkpoint(folder_));
  EXPECT_EQ(fingerprint(loaded), fingerprint(saved));
  std::filesystem::remove(folder_ + "/model-00002-of-00002.safetensors");
  EXPECT_THAT(error(), HasSubstr("model-00002"));
}

TEST_F(CheckpointTest, HalfPrecisionIsConverted) {
  ModelConfig config = tiny_model_config();
  const Checkpoint saved = make_test_checkpoint(config, 3);
  ASSERT_TRUE(save_checkpoint(folder_, saved, nullptr).ok());
  // 1, -2, the smallest subnormal, infinity, repeated.
  const uint16_t half[] = {0x3c00, 0xc000, 0x0001, 0x7c00};
  const float value[] = {1.0f, -2.0f, 0x1p-24f, INFINITY};
  std::vector<std::vector<uint16_t>> data;
  std::vector<TensorToWrite> tensors;
  for (const Weight& weight : saved.weights) {
    data.emplace_back(weight.data.size());
    for (size_t i = 0; i < data.back().size(); ++i) data.back()[i] = half[i % 4];
    tensors.push_back(as_written(weight, TensorType::kF16, std::as_bytes(std::span(data.back()))));
  }
  ASSERT_TRUE(write_safetensors(folder_ + "/model.safetensors", tensors).ok());
  auto loaded = must(load_checkpoint(folder_));
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(loaded.weights[1].data[i], bf16_from_float(value[i]));
  }
}

TEST_F(CheckpointTest, SaysWhatIsMissingOrWrong) {
  EXPECT_THAT(error(), HasSubstr("config.json"));
  const Checkpoint saved = make_test_checkpoint(tiny_model_config(), 3);
  ASSERT_TRUE(save_checkpoint(folder_, saved, nullptr).ok());

  ModelConfig deeper = saved.config;
  deeper.num_layers = 3;
  write_config(deeper);
  EXPECT_THAT(error(), HasSubstr("model.layers.2.input_layernorm.weight"));

  ModelConfig biased = saved.config;
  biased.family = ModelFamily::kQwen2;
  write_config(biased);
  EXPECT_THAT(error(), HasSubstr("model.layers.0.self_attn.q_proj.bias"));

  ModelConfig wider = saved.config;
  wider.intermediate_size = 96;
  write_config(wider);
  EXPECT_THAT(error(), HasSubstr("[64, 32]"));
  EXPECT_THAT(error(), HasSubstr("[96, 32]"));

  ASSERT_TRUE(write_file_atomically(folder_ + "/config.json", "{").ok());
  EXPECT_THAT(error(), HasSubstr("JSON"));
  ASSERT_TRUE(save_checkpoint(folder_, saved, nullptr).ok());
  std::filesystem::resize_file(folder_ + "/model.safetensors", 5000);
  EXPECT_THAT(error(), HasSubstr("truncated"));
  std::filesystem::remove(folder_ + "/model.safetensors");
  EXPECT_THAT(error(), HasSubstr("model.safetensors"));
}

TEST_F(CheckpointTest, RefusesWeightsThatDoNotFitTheConfig) {
  Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 3);
  checkpoint.weights[2].data.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(Model::create(checkpoint).status()));
  checkpoint.weights.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(Model::create(checkpoint).status()));
}

// A machine with 2 kB left.
TEST_F(CheckpointTest, WhatDoesNotFitIntoMemoryIsRefused) {
  ASSERT_TRUE(save_checkpoint(folder_, make_test_checkpoint(tiny_model_config(), 3), nullptr).ok());
  TemporaryFolder machine;
  base::look_for_memory_below(machine.file("proc/meminfo", "MemAvailable: 2 kB").path());
  EXPECT_THAT(error(), testing::AllOf(HasSubstr("the weights in " + folder_), HasSubstr("left")));
  EXPECT_THROW(AlignedArray<float>(size_t{1} << 20), base::OutOfMemory);
  base::look_for_memory_below("");
  EXPECT_TRUE(load_checkpoint(folder_).ok());
}

TEST_F(CheckpointTest, EveryFamilyComesBackAndIsItself) {
  std::vector<std::string> seen;
  for (const ModelConfig& config : family_configs()) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 3);
    size_t parameters = 0;
    for (const Weight& weight : checkpoint.weights) parameters += weight.data.size();
    EXPECT_EQ(parameters, config.num_parameters());
    EXPECT_EQ(checkpoint.final_norm().name, "model.norm.weight");
    const std::string folder = temporary_.path(std::to_string(seen.size()));
    ASSERT_TRUE(save_checkpoint(folder, checkpoint, nullptr).ok());
    auto again = must(load_checkpoint(folder));
    EXPECT_EQ(fingerprint(again), fingerprint(checkpoint));
    EXPECT_THAT(seen, ::testing::Not(::testing::Contains(fingerprint(checkpoint))));
    seen.push_back(fingerprint(checkpoint));
  }
}

TEST_F(CheckpointTest, TextAlsoEndsWhereTheGenerationConfigSays) {
  const auto load_with = [&](const char* generation) {
    EXPECT_TRUE(
        save_checkpoint(folder_, make_test_checkpoint(tiny_model_config(), 3), nullptr).ok());
    EXPECT_TRUE(write_file_atomically(folder_ + "/generation_config.json", generation).ok());
    return load_checkpoint(folder_);
  };
  EXPECT_THAT(load_with(R"({"eos_token_id": [3, 256, 7]})")->config.eos_token_ids,
              ::testing::ElementsAre(256, 3, 7));
  EXPECT_THAT(load_with(R"({"eos_token_id": 9})")->config.eos_token_ids,
              ::testing::ElementsAre(256, 9));
  EXPECT_THAT(load_with(R"({"temperature": 0.6})")->config.eos_token_ids,
              ::testing::ElementsAre(256));
  for (const char* broken : {"{", R"({"eos_token_id": [-1]})", R"({"eos_token_id": 100000})"}) {
    EXPECT_THAT(std::string(load_with(broken).status().message()),
                HasSubstr("generation_config.json"));
  }
}

TEST_F(CheckpointTest, WhatChangesTheArithmeticChangesTheFingerprint) {
  const auto changed = [](const ModelConfig& config, auto&& change) {
    Checkpoint checkpoint = make_test_checkpoint(config, 3);
    const std::string before = fingerprint(checkpoint);
    change(checkpoint.config);
    return fingerprint(checkpoint) != before;
  };
  const ModelConfig llama = tiny_model_config(), experts = tiny_qwen3_moe_config();
  EXPECT_TRUE(changed(llama, [](ModelConfig& c) { c.family = ModelFamily::kMistral; }));
  EXPECT_TRUE(changed(llama, [](ModelConfig& c) { c.sliding_window = 64; }));
  EXPECT_TRUE(changed(llama, [](ModelConfig& c) { c.mlp_bias = true; }));
  EXPECT_TRUE(changed(llama, [](ModelConfig& c) {
    c.rope_scaling = {.kind = RopeScaling::Kind::kYarn, .factor = 2, .attention_factor = 1.2};
  }));
  EXPECT_TRUE(changed(llama, [](ModelConfig& c) { c.rope_theta *= 2; }));
  EXPECT_TRUE(changed(experts, [](ModelConfig& c) { c.experts_per_token = 2; }));
  EXPECT_TRUE(changed(experts, [](ModelConfig& c) { c.norm_topk_prob = true; }));
}

// Stores on disk and workers of other versions know a model by it: it changes when the bits of KV
// do, as when attention began to add in splits, and at no other time.
TEST_F(CheckpointTest, FingerprintsAreThoseOfEarlierVersions) {
  EXPECT_EQ(fingerprint(make_test_checkpoint(tiny_model_config(), 3)),
            "3515c81b93ff84474f3022436b7d5e7c");
  ModelConfig config = tiny_model_config();
  config.family = ModelFamily::kQwen3;
  config.tie_word_embeddings = false;
  EXPECT_EQ(fingerprint(make_test_checkpoint(config, 3)), "2dbfd2108161dd9c58f81bb23d5c1e29");
}

TEST_F(CheckpointTest, FingerprintsFollowFromWhatLogitsFollowFrom) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 3);
  const std::string before = fingerprint(checkpoint);
  EXPECT_EQ(before.size(), 32u);
  Checkpoint same = checkpoint;
  same.config.eos_token_ids.push_back(9);
  same.config.max_position_embeddings /= 2;
  EXPECT_EQ(fingerprint(same), before);
  ASSERT_TRUE(save_checkpoint(folder_, checkpoint, nullptr).ok());
  EXPECT_EQ(fingerprint(load_checkpoint(folder_).value()), before);
  for (size_t i = 0; i < checkpoint.weights.size(); ++i) {
    Checkpoint other = checkpoint;
    other.weights[i].data.back() ^= 1;
    EXPECT_NE(fingerprint(other), before) << other.weights[i].name;
  }
}

TEST_F(CheckpointTest, TheIndexSaysWhichFileHoldsATensor) {
  const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 3);
  ASSERT_TRUE(save_checkpoint(folder_, checkpoint, nullptr).ok());
  std::vector<TensorToWrite> tensors;
  nlohmann::json map;
  for (const Weight& weight : checkpoint.weights) {
    tensors.push_back(as_written(weight));
    map[weight.name] = "z.safetensors";
  }
  // A file that comes first and has other numbers under one of the names.
  Weight stale = checkpoint.weights[1];
  for (uint16_t& bits : stale.data) bits ^= 0x55;
  const TensorToWrite copies[] = {as_written(stale), as_written(checkpoint.weights[0])};
  map[checkpoint.weights[0].name] = "a.safetensors";
  ASSERT_TRUE(write_safetensors(folder_ + "/a.safetensors", copies).ok());
  ASSERT_TRUE(write_safetensors(folder_ + "/z.safetensors", tensors).ok());
  const auto load_with = [&] {
    const nlohmann::json index = {{"weight_map", map}};
    EXPECT_TRUE(
        write_file_atomically(folder_ + "/model.safetensors.index.json", index.dump()).ok());
    return load_checkpoint(folder_);
  };
  const auto loaded = must(load_with());
  EXPECT_EQ(fingerprint(loaded), fingerprint(checkpoint));
  // What the index does not name is nowhere, and what it names must be where it says.
  map[checkpoint.weights[2].name] = "a.safetensors";
  EXPECT_THAT(std::string(load_with().status().message()),
              ::testing::AllOf(HasSubstr(checkpoint.weights[2].name), HasSubstr("a.safetensors")));
  map.erase(checkpoint.weights[2].name);
  EXPECT_THAT(std::string(load_with().status().message()),
              HasSubstr("index.json lacks the tensor"));
}

TEST_F(CheckpointTest, AnOutputThatIsNotTheEmbeddingIsUsed) {
  ModelConfig config = tiny_model_config();
  config.tie_word_embeddings = false;
  Checkpoint checkpoint = make_test_checkpoint(config, 3);
  const auto load_tied =
      [&](size_t from) {  // as if the config said "tied", with the tensors from this one on
        EXPECT_TRUE(save_checkpoint(folder_, checkpoint, nullptr).ok());
        std::vector<TensorToWrite> tensors;
        for (size_t i = from; i < checkpoint.weights.size(); ++i)
          tensors.push_back(as_written(checkpoint.weights[i]));
        EXPECT_TRUE(write_safetensors(folder_ + "/model.safetensors", tensors).ok());
        ModelConfig tied = config;
        tied.tie_word_embeddings = true;
        write_config(tied);
        return load_checkpoint(folder_);
      };
  auto loaded = load_tied(0);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_FALSE(loaded->config.tie_word_embeddings);
  EXPECT_EQ(loaded->lm_head().data, checkpoint.weights.back().data);
  EXPECT_EQ(fingerprint(*loaded), fingerprint(checkpoint));
  EXPECT_THAT(loaded->remarks, ::testing::ElementsAre(HasSubstr("lm_head.weight")));
  // The same numbers twice are a tied model, and the output's alone are the embedding's.
  const std::vector<uint16_t> head = checkpoint.weights.back().data;
  checkpoint.weights[0].data = head;
  for (const size_t from : {0, 1}) {
    loaded = load_tied(from);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->config.tie_word_embeddings);
    EXPECT_EQ(loaded->lm_head().data, head);
    EXPECT_TRUE(loaded->remarks.empty());
  }
}

TEST_F(CheckpointTest, WhatIsNotUsedIsNamedInOneLine) {
  ModelConfig config = tiny_model_config();
  const Checkpoint checkpoint = make_test_checkpoint(config, 3);
  ASSERT_TRUE(save_checkpoint(folder_, checkpoint, nullptr).ok());
  config.num_layers -= 1;  // a layer is one too many
  write_config(config);
  const auto loaded = must(load_checkpoint(folder_));
  const std::string surplus =
      "model.layers." + std::to_string(config.num_layers) + ".input_layernorm.weight";
  EXPECT_THAT(loaded.remarks,
              ::testing::ElementsAre(::testing::AllOf(HasSubstr("9 tensors"), HasSubstr(surplus),
                                                      HasSubstr("and 1 more"))));
}

TEST(ShardIndex, RefusesPathsAndWrongTypes) {
  EXPECT_TRUE(parse_shard_index(R"({"weight_map":{"a":"x.safetensors"}})").ok());
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})",
        R"({"weight_map":{"a":"../x"}})", R"({"weight_map":{"a":"/etc/passwd"}})",
        R"({"weight_map":{"a":""}})", R"({"weight_map":{"a":"x\u0000y"}})"}) {
    EXPECT_FALSE(parse_shard_index(text).ok()) << text;
  }
}

}  // namespace
}  // namespace baton::engine
