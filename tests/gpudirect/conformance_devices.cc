// The conformance suite over memory of devices: on one side or both, over every provider, with the
// strict fake as the driver of this process.
#include "tests/conformance/harness.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/sanitized.h"

namespace baton {
namespace {

class FakeDevices final : public Devices {
 public:
  FakeDevices(bool dma_buf, Ipc ipc)
      : ipc_(ipc),
        installed_({.attributes = dma_buf ? gpudirect::h100() : gpudirect::without_dma_buf(),
                    .ipc_handles = ipc == Ipc::kHandles}) {}
  Memory allocate(size_t bytes) override {
    if (ipc_ == Ipc::kDescriptors) {
      slabs_.push_back(*installed_.memory().allocate(0, bytes));
      std::byte* const at = slabs_.back()->data();
      return {at, fake_.view(reinterpret_cast<uintptr_t>(at), bytes)};
    }
    taken_.push_back(fake_.allocate(bytes));
    return {reinterpret_cast<void*>(uintptr_t{taken_.back()}), fake_.view(taken_.back(), bytes)};
  }
  void check() override {
    // The workers did map and copy, and did not stage.
    if (ipc_ == Ipc::kDescriptors && fake_.calls_of("cuMemcpyAsync") > 0) {
      EXPECT_GT(fake_.calls_of("cuMemImportFromShareableHandle"), 0u);
    }
    if (ipc_ == Ipc::kHandles) {
      EXPECT_GT(fake_.calls_of("cuIpcGetMemHandle"), 0u);
      // But for what is submitted before the peer's allocations are known: four transfers of four
      // chunks, at most.
      EXPECT_LE(fake_.copies_with_host(), 32u)
          << "both are in one process: it is used where it lies";
    }
    slabs_.clear();
    for (const gpudirect::DevicePointer at : taken_) fake_.free(at);
    taken_.clear();
    installed_.expect_clean();
    // Within the device it takes a moment.
    EXPECT_LE(fake_.largest_copy(), size_t{ipc_ == Ipc::kNone ? 4u : 32u} << 20);
  }

 private:
  const Ipc ipc_;
  gpudirect::InstalledFake installed_;
  gpudirect::FakeDriver& fake_ = installed_.fake();
  std::vector<gpudirect::DevicePointer> taken_;
  std::vector<std::unique_ptr<internal::DeviceBuffer>> slabs_;
};

}  // namespace

std::unique_ptr<Devices> fake_devices(bool dma_buf, Ipc ipc) {
  return std::make_unique<FakeDevices>(dma_buf, ipc);
}

// Both sides over all of them; one side over some: what the other one does is the same.
std::vector<Variant> all_variants() {
  std::vector<Variant> variants = {
      {.name = "sim_both", .provider = "sim", .near_device = true, .far_device = true},
      {.name = "shm_both", .provider = "shm", .near_device = true, .far_device = true},
      {.name = "ipc",
       .provider = "shm",
       .near_device = true,
       .far_device = true,
       .ipc = Ipc::kDescriptors},
      {.name = "ipc_handles",
       .provider = "shm",
       .near_device = true,
       .far_device = true,
       .ipc = Ipc::kHandles},
      {.name = "shm_far", .provider = "shm", .far_device = true},
      {.name = "tcp_both", .provider = "tcp", .near_device = true, .far_device = true},
      {.name = "tcp_near", .provider = "tcp", .near_device = true},
      {.name = "verbs_direct", .provider = "verbs_fake", .near_device = true, .far_device = true},
      {.name = "verbs_staged",
       .provider = "verbs_fake",
       .near_device = true,
       .far_device = true,
       .dma_buf = false}};
  // Nearly half of the time under a sanitizer, for what the others have as well.
  if (kSanitized) {
    std::erase_if(variants, [](const Variant& each) {
      return std::string_view(each.name) == "tcp_near" || std::string_view(each.name) == "shm_far";
    });
  }
  for (const auto& [name, factory] : registered_providers()) {
    if (name != "ucx" || kSanitized) continue;
    variants.push_back({.name = "ucx_both",
                        .provider = "ucx",
                        .settings = {{"ucx.tls", "tcp"}},
                        .near_device = true,
                        .far_device = true});
  }
  // The first of them in full; of the others fewer rounds, and transfers of fewer bytes.
  for (Variant& variant : variants) variant.slow = std::string_view(variant.name) != "tcp_both";
  return variants;
}

}  // namespace baton
