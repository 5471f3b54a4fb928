// The verbs provider over a strict fake of the verbs calls: two devices, two queue pairs on each.
#include "tests/conformance/harness.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "verbs/provider.h"

namespace baton {
namespace {

class FakeVerbsSurroundings final : public Surroundings {
 public:
  void prepare(WorkerOptions& options) override {
    options.extra_providers = {verbs::verbs_over(fake_.api())};
    options.settings.emplace_back("verbs.qps", "2");
    // The fake moves when this process runs: on a busy machine that is no sign of a fault.
    options.settings.emplace_back("verbs.stall_ms", "60000");
  }
  void check() override {
    EXPECT_THAT(fake_.violations(), testing::IsEmpty());
    EXPECT_EQ(fake_.stats().not_ready, 0u) << "a message found no receive posted";
    EXPECT_EQ(fake_.objects(), 0u) << "left behind";
  }

 private:
  FakeVerbs fake_{{.devices = 2}};
};

}  // namespace

std::unique_ptr<Surroundings> fake_verbs_surroundings() {
  return std::make_unique<FakeVerbsSurroundings>();
}

}  // namespace baton
