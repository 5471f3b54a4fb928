// Fuzzes what an shm peer says of memory on a device: the rows of its control segment, handles and
// descriptors of allocations with sizes of its choice, and transfers to them. What is accepted is
// copied by the driver, within an allocation that is really there; the fake of the driver sees
// everything else.

#include "gpudirect/contract/memory_place.h"
#include "tests/fuzz/expect.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/std.h"
#include "transport/base/wire.h"
#include "transport/shm/device_slices.h"
#include "transport/shm/peer_memory.h"

namespace {

using namespace baton;

constexpr size_t kBytes = 64 << 10;
constexpr uint32_t kRows = 4;

class FuzzedPeer {
 public:
  explicit FuzzedPeer(std::string_view input)
      : in_(input),
        driver_(gpudirect::FakeDriver::driver()),
        devices_(std::make_unique<gpudirect::CudaMemory>(
            [this] { return &driver_; },
            gpudirect::CudaMemory::Options{
                .kernels = {}, .table = gpudirect::CopyTable{}, .root = "/nowhere"})),
        ours_(fake_.allocate(kBytes)),
        theirs_(fake_.allocate(kBytes)),
        lane_(std::make_unique<shm::Lane>()),
        table_(WorkerUid::random()) {
    baton::internal::use_device_memory(devices_.get());
    auto control = shm::create_file("fuzzed-control", sizeof(shm::ControlSegment));
    expect(control.ok());
    rows_ = control->mapping.as<shm::ControlSegment>()->regions;
    memory_.emplace(std::move(control->mapping), shm::CmaPeer{.pid = 1},
                    absl::FailedPreconditionError("no CMA"), lane_.get());
    RegionEntry* const row =
        *table_.add(gpudirect::pointer_of<std::byte>(ours_), kBytes, Access::kRemoteReadWrite, {});
    row->place = {MemoryKind::kDevice, 0};
    local_ = row->index;
    lane_->open = 1;
  }
  ~FuzzedPeer() {
    memory_.reset();
    for (const auto& mark : lane_->opened) expect(mark == 0);
    baton::internal::use_device_memory(nullptr);
    devices_.reset();
    fake_.free(ours_);
    fake_.free(theirs_);
    expect(fake_.finish().empty());
  }

  void run() {
    shm::DeviceSlices slices(*memory_, *lane_, table_, true);
    for (int i = 0; i < 64 && !in_.failed(); ++i) step(slices);
    slices.finish();
    while (auto* item = slices.over()) slices.remove(item);
  }

 private:
  void step(shm::DeviceSlices& slices) {
    switch (in_.number<uint8_t>() % 6) {
      case 0:
        return say_row();
      case 1:
        return say_handle();
      case 2:
        memory_->drop_file(1 + in_.number<uint8_t>() % 4);
        return;
      case 3: {  // the owner asks a handle back
        auto& mark = lane_->opened[in_.number<uint8_t>() % 4];
        if (mark != 0) mark |= shm::Lane::kAskedBack;
        slices.drop_stale();
        if (memory_->asked_back()) memory_->give_back();
        return;
      }
      case 4:
        return transfer(slices);
      default:
        slices.settle();
        slices.begin();
        while (auto* item = slices.over()) slices.remove(item);
    }
  }

  void say_row() {
    shm::SharedRegion& row = rows_[in_.number<uint8_t>() % kRows];
    row.generation = in_.number<uint8_t>() % 3;
    row.access = in_.number<uint8_t>();
    row.key = in_.number<uint8_t>() % 3;
    row.size = in_.number<uint64_t>();
    row.base = in_.number<uint64_t>();
    row.file = in_.number<uint8_t>() % 5;
    row.offset = in_.number<uint64_t>();
  }

  void say_handle() {
    const uint8_t how = in_.number<uint8_t>();
    DeviceExport memory{.bytes = in_.number<uint64_t>(), .by_handle = true};
    memory.device_uuid.fill(1);
    memory.same_process = how % 2 != 0;
    memory.allocation = {how % 4 == 1 ? theirs_ : in_.number<uint64_t>(), how / 16u};
    if (const auto facts = gpudirect::query_pointer(driver_, theirs_); how % 8 == 1 && facts.ok()) {
      memory.allocation[1] = facts->buffer;
    }
    const std::string_view handle = in_.take(in_.number<uint8_t>() % 65);
    std::copy(handle.begin(), handle.end(), memory.handle.begin());
    memory_->add_device_file(how % 5, base::UniqueFd(), memory).IgnoreError();
  }

  void transfer(shm::DeviceSlices& slices) {
    if (slices.size() == kTransfers) return;
    TransferDescriptor& what = transfers_[used_++ % kTransfers];
    what = {};
    what.op = in_.number<uint8_t>() % 2 == 0 ? Op::kWrite : Op::kRead;
    what.local_region = local_;
    what.local_base = gpudirect::pointer_of<std::byte>(ours_);
    what.bytes = 1 + in_.number<uint16_t>() % kBytes;
    what.local = Layout::contiguous(0, what.bytes);
    what.remote_layout = Layout::contiguous(in_.number<uint16_t>(), what.bytes);
    what.remote.index = in_.number<uint8_t>() % kRows;
    what.remote.generation = in_.number<uint8_t>() % 3;
    what.remote.key = in_.number<uint8_t>() % 3;
    what.remote.size = in_.number<uint64_t>();
    what.remote.kind = MemoryKind::kDevice;
    slices.post({.transfer = &what, .index = 0, .begin = 0, .end = what.bytes});
  }

  static constexpr size_t kTransfers = 8;
  base::WireReader in_;
  gpudirect::FakeDriver fake_{{.memory_bytes = 64 << 20}};
  gpudirect::Driver driver_;
  std::unique_ptr<gpudirect::CudaMemory> devices_;
  const gpudirect::DevicePointer ours_;
  const gpudirect::DevicePointer theirs_;
  const std::unique_ptr<shm::Lane> lane_;
  RegionTable table_;
  uint32_t local_ = 0;
  shm::SharedRegion* rows_ = nullptr;
  std::optional<shm::PeerMemory> memory_;
  std::array<TransferDescriptor, kTransfers> transfers_{};
  size_t used_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedPeer({reinterpret_cast<const char*>(data), size}).run();
  return 0;
}
