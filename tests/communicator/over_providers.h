// Groups over every provider that this machine has, the fake verbs among them.
#pragma once

#include "collectives/window.h"
#include "tests/communicator/group.h"
#include "tests/conformance/harness.h"
#include "tests/fails_with.h"
#include "tests/test.h"
#include "tests/usable_provider.h"

namespace baton {

class OverProviders : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "verbs_fake") {
      if (const std::string why = why_unusable(GetParam()); !why.empty()) GTEST_SKIP() << why;
      return;
    }
    verbs_ = fake_verbs_surroundings();
    if (verbs_ == nullptr) GTEST_SKIP() << "built without the headers of rdma-core";
  }
  void TearDown() override {
    if (verbs_ != nullptr) verbs_->check();
  }
  CommunicatorOptions options() {
    CommunicatorOptions out = test_options(GetParam());
    if (verbs_ != nullptr) {
      out.worker.providers.clear();
      verbs_->prepare(out.worker);
    }
    out.timeout = patient(std::chrono::seconds(30));
    return out;
  }

 private:
  std::unique_ptr<Surroundings> verbs_;
};

// What tests of windows do again and again.

inline absl::Status ended(Communicator& comm, const absl::StatusOr<Work>& work) {
  return work.ok() ? comm.wait(*work) : work.status();
}
inline std::unique_ptr<Window> window_of(Communicator& comm, size_t bytes, uint32_t signals = 1) {
  auto window = Window::allocate(comm, bytes, {.signals = signals});
  EXPECT_TRUE(window.ok()) << "rank " << comm.rank() << ": " << window.status();
  return window.ok() ? *std::move(window) : nullptr;
}

}  // namespace baton
