// A model on this machine's GPU beside the CPU: the same bits in fp32 arithmetic, near ones in
// bf16.
#include "engine/device/device_model.h"
#include "engine/kernels/aligned.h"
#include "engine/model/model.h"
#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::device {
namespace {

constexpr size_t kBlocks = 64;
// Of the largest logit, what one of bf16 arithmetic may be off by: products differ by some 2^-16 of
// their largest numbers, and now and then that rounds an activation to bf16's next number.
constexpr float kNear = 0.03f;

ModelConfig config_of_some_size() {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 256;
  config.intermediate_size = 320;
  config.num_layers = 3;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  return config;
}

class ModelOnThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (gpudirect::kernels::image().empty()) {
      GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    }
    driver_ = *driver;
    limits_.max_tokens = 128;
    limits_.max_chunks = 4;
    limits_.max_context = 256;
    std::mt19937_64 random(1);
    for (int32_t& token : text_) token = static_cast<int32_t>(random() % 256);
    for (auto& table : tables_) {
      table.resize(16);
      std::iota(table.rbegin(), table.rend(), static_cast<uint32_t>(16 * (&table - &tables_[0])));
    }
  }
  SequenceChunk chunk(size_t sequence, int position, size_t count) const {
    return {.tokens = std::span(text_).subspan(static_cast<size_t>(position) + 5 * sequence, count),
            .position = position,
            .block_table = tables_[sequence]};
  }
  std::unique_ptr<DeviceModel> on_gpu(const Checkpoint& checkpoint, Arithmetic arithmetic) {
    auto gpu = Gpu::open(*driver_, 0);
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    auto model =
        DeviceModel::create(*std::move(gpu), checkpoint, arithmetic, gpudirect::machine_cublaslt());
    EXPECT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE((*model)->prepare(limits_).ok());
    return *std::move(model);
  }
  static std::vector<float> step(ModelRunner& runner, KvCache& cache,
                                 const std::vector<SequenceChunk>& chunks, size_t vocab) {
    std::vector<float> logits(chunks.size() * vocab);
    LayerHook none;
    const absl::Status status = runner.forward(chunks, cache, none, logits.data());
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
  // Prompts, pieces of some and single tokens, on both; the largest difference of a logit, and the
  // largest logit.
  std::pair<float, float> difference(const ModelConfig& config, Arithmetic arithmetic) {
    const Checkpoint checkpoint = make_test_checkpoint(config, 1);
    ComputePool pool(1);
    const Model model = *Model::create(checkpoint, arithmetic);
    CpuRunner cpu(model, pool, nullptr);
    EXPECT_TRUE(cpu.prepare(limits_).ok());
    const std::unique_ptr<DeviceModel> gpu = on_gpu(checkpoint, arithmetic);
    std::printf("%s\n", gpu->name().c_str());
    const KvGeometry geometry = config.kv_geometry();
    AlignedArray<std::byte> memory(geometry.cache_bytes(kBlocks));
    KvCache here(geometry, memory.data(), kBlocks);
    KvCache there(geometry, *gpu->allocate_cache(memory.size()), kBlocks);
    const auto vocab = static_cast<size_t>(config.vocab_size);
    float most = 0, largest = 0;
    for (const std::vector<SequenceChunk>& chunks :
         {std::vector{chunk(0, 0, 100)}, std::vector{chunk(1, 0, 9), chunk(0, 100, 1)},
          std::vector{chunk(0, 101, 1), chunk(2, 0, 70), chunk(1, 9, 17)},
          std::vector{chunk(2, 70, 1)}}) {
      const std::vector<float> ours = step(*gpu, there, chunks, vocab);
      const std::vector<float> wanted = step(cpu, here, chunks, vocab);
      for (size_t i = 0; i < ours.size(); ++i) {
        most = std::max(most, std::fabs(ours[i] - wanted[i]));
        largest = std::max(largest, std::fabs(wanted[i]));
      }
    }
    return {most, largest};
  }

  const gpudirect::Driver* driver_ = nullptr;
  WorkspaceLimits limits_;
  std::vector<int32_t> text_ = std::vector<int32_t>(256);
  std::vector<std::vector<uint32_t>> tables_ = std::vector<std::vector<uint32_t>>(3);
};

TEST_F(ModelOnThisMachine, HasTheCpusBitsInFp32) {
  for (const ModelConfig& config : {tiny_model_config(), config_of_some_size()}) {
    EXPECT_EQ(difference(config, Arithmetic::kFp32).first, 0);
  }
}

TEST_F(ModelOnThisMachine, IsNearTheCpuInBf16) {
  for (const ModelConfig& config : {tiny_model_config(), config_of_some_size()}) {
    const auto [most, largest] = difference(config, Arithmetic::kBf16);
    std::printf("bf16: logits differ by %g, the largest is %g\n", most, largest);
    EXPECT_LE(most, kNear * largest);
  }
}

TEST_F(ModelOnThisMachine, ARowHasTheSameBitsInEveryBatch) {
  const ModelConfig config = config_of_some_size();
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    const std::unique_ptr<DeviceModel> gpu = on_gpu(checkpoint, arithmetic);
    const KvGeometry geometry = config.kv_geometry();
    KvCache cache(geometry, *gpu->allocate_cache(geometry.cache_bytes(kBlocks)), kBlocks);
    const auto vocab = static_cast<size_t>(config.vocab_size);
    const std::vector<float> alone = step(*gpu, cache, {chunk(0, 0, 40)}, vocab);
    step(*gpu, cache, {chunk(0, 0, 3)}, vocab);
    step(*gpu, cache, {chunk(1, 0, 80), chunk(0, 3, 36)}, vocab);
    const std::vector<float> among = step(*gpu, cache, {chunk(1, 80, 20), chunk(0, 39, 1)}, vocab);
    EXPECT_TRUE(
        std::equal(alone.begin(), alone.end(), among.begin() + static_cast<ptrdiff_t>(vocab)));
  }
}

// The same bits launched kernel by kernel and as a graph, and how long a step of decoding takes.
TEST_F(ModelOnThisMachine, AGraphHasTheBitsOfItsLaunches) {
  class Calm : public LayerHook {
    bool waits() const override { return false; }
    bool hears_layers() const override { return false; }
  };
  const ModelConfig config = config_of_some_size();
  const Checkpoint checkpoint = make_test_checkpoint(config, 1);
  constexpr int kSteps = 60;
  std::vector<float> last[2];
  for (const bool graphs : {false, true}) {
    const std::unique_ptr<DeviceModel> gpu = on_gpu(checkpoint, Arithmetic::kFp32);
    gpu->use_graphs(graphs);
    const KvGeometry geometry = config.kv_geometry();
    KvCache cache(geometry, *gpu->allocate_cache(geometry.cache_bytes(kBlocks)), kBlocks);
    const auto vocab = static_cast<size_t>(config.vocab_size);
    step(*gpu, cache, {chunk(0, 0, 100), chunk(1, 0, 9)}, vocab);
    Calm calm;
    std::vector<float> logits(2 * vocab);
    std::vector<double> us;
    for (int i = 0; i < kSteps; ++i) {
      const std::vector<SequenceChunk> chunks = {chunk(0, 100 + i, 1), chunk(1, 9 + i, 1)};
      const auto begin = std::chrono::steady_clock::now();
      ASSERT_TRUE(gpu->forward(chunks, cache, calm, logits.data()).ok());
      us.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count());
    }
    EXPECT_EQ(gpu->graphs_recorded(), graphs ? 1u : 0u);
    std::nth_element(us.begin(), us.begin() + kSteps / 2, us.end());
    std::printf("row {\"name\": \"decode step\", \"shape\": \"%d layers, %s\", \"us\": %.1f}\n",
                config.num_layers, graphs ? "a graph" : "kernel by kernel", us[kSteps / 2]);
    last[graphs ? 1 : 0] = logits;
  }
  EXPECT_EQ(last[0], last[1]);
}

}  // namespace
}  // namespace baton::engine::device
