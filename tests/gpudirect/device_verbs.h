// Two workers over the fake adapters, and memory of the fake device at both ends.
#pragma once

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {

class DeviceVerbs : public testing::Test {
 protected:
  static constexpr size_t kBytes = VerbsPair::kBytes;

  // Before the workers there are: the driver, and who asks it.
  void use_device(gpudirect::FakeOptions options, const gpudirect::CudaMemory::Options& how) {
    installed_.emplace(std::move(options), how);
    gpu_ = &installed_->fake();
  }
  void connect() {
    pair_->connect();
    near_ = gpu_->allocate(kBytes);
    far_ = gpu_->allocate(kBytes);
  }
  void TearDown() override {
    if (pair_ == nullptr) return;
    pair_.reset();
    gpu_->on_flush(nullptr);
    gpu_->free(near_);
    gpu_->free(far_);
    installed_.reset();
  }
  static absl::StatusOr<MemoryRegion> give(VerbsPair::Side& side, gpudirect::DevicePointer at,
                                           size_t bytes = kBytes) {
    return side.worker->register_memory(reinterpret_cast<void*>(uintptr_t{at}), bytes);
  }

  std::optional<gpudirect::CleanFake> installed_;
  gpudirect::FakeDriver* gpu_ = nullptr;
  std::unique_ptr<VerbsPair> pair_;
  gpudirect::DevicePointer near_ = 0, far_ = 0;
};

}  // namespace baton
