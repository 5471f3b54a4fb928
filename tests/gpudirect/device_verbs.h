// Two workers over the fake adapters, and memory of the fake device at both ends.
#pragma once

#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/fake/made_up_costs.h"
#include "tests/test.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {

class DeviceVerbs : public testing::Test {
 protected:
  static constexpr size_t kBytes = VerbsPair::kBytes;

  // Before the workers there are: the driver, and who asks it.
  void use_device(gpudirect::FakeOptions options, gpudirect::CudaMemory::Options how) {
    gpu_ = std::make_unique<gpudirect::FakeDriver>(std::move(options));
    driver_ = gpudirect::FakeDriver::driver();
    memory_ = std::make_unique<gpudirect::CudaMemory>([this] { return &driver_; }, std::move(how));
    internal::use_device_memory(memory_.get());
  }
  void connect() {
    pair_->connect();
    near_ = gpu_->allocate(kBytes);
    far_ = gpu_->allocate(kBytes);
  }
  void TearDown() override {
    if (pair_ == nullptr) return;
    pair_.reset();
    internal::use_device_memory(nullptr);
    memory_.reset();
    gpu_->on_flush(nullptr);
    gpu_->free(near_);
    gpu_->free(far_);
    EXPECT_THAT(gpu_->finish(), testing::IsEmpty());
    gpu_.reset();
  }
  static absl::StatusOr<MemoryRegion> give(VerbsPair::Side& side, gpudirect::DevicePointer at,
                                           size_t bytes = kBytes) {
    return side.worker->register_memory(reinterpret_cast<void*>(uintptr_t{at}), bytes);
  }

  std::unique_ptr<gpudirect::FakeDriver> gpu_;
  gpudirect::Driver driver_;
  std::unique_ptr<gpudirect::CudaMemory> memory_;
  std::unique_ptr<VerbsPair> pair_;
  gpudirect::DevicePointer near_ = 0, far_ = 0;
};

}  // namespace baton
