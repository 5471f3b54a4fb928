// Device memory over verbs: recognised, registered through a dma-buf or by its address, proved, and
// moved by the adapter alone.
#include "tests/gpudirect/device_verbs.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "verbs/device/locality.h"

namespace baton {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DeviceMemoryOverVerbs : public DeviceVerbs {
 protected:
  void start(gpudirect::FakeOptions options = {}, FakeOptions adapters = {}) {
    gpudirect::CudaMemory::Options how = gpudirect::options_of_this_test();
    if (machine_.has_value()) how.root = machine_->path();
    use_device(std::move(options), how);
    if (machine_.has_value()) {
      adapters.peer_memory = [this](const void* address, size_t bytes, uint64_t* offset) {
        return gpu_->descriptor_for_adapters(address, bytes, offset);
      };
      locality_ = verbs::Locality::from_sysfs(machine_->path());
    }
    pair_ = std::make_unique<VerbsPair>(std::move(adapters), settings_, locality_);
    connect();
  }
  // Both ends register, and a write from one to the other is right. The request is for more.
  void write_across(TransferRequest& request) {
    const MemoryRegion near = must(give(pair_->a, near_)), far = must(give(pair_->b, far_));
    const std::string sent = pattern(5);
    gpu_->write(near_, sent);
    request = pair_->request(Op::kWrite);
    request.local = near;
    request.remote = *pair_->b.worker->remote_region(far);
    ASSERT_TRUE(pair_->run(request).ok());
    EXPECT_TRUE(gpu_->read(far_, kBytes) == sent);
  }
  void check_staged(const std::string& why) {
    TransferRequest request;
    write_across(request);
    if (HasFatalFailure()) return;
    const std::string sent = pattern(5);
    EXPECT_THAT(pair_->a.worker->explain(pair_->a.peer),
                AllOf(HasSubstr("CUDA device 0: staged through 64 MiB"), HasSubstr(why)));
    EXPECT_EQ(pair_->a.worker->stats().staged_transfers, 1u);
    EXPECT_EQ(pair_->a.worker->stats().staged_bytes, kBytes);
    EXPECT_EQ(pair_->b.worker->stats().staged_bytes, kBytes);
    // And with memory of the host's at the other end, which its rails do reach.
    request.remote = pair_->b.remote;
    EXPECT_TRUE(pair_->run(request).ok());
    EXPECT_TRUE(std::equal(sent.begin(), sent.end(),
                           reinterpret_cast<const char*>(pair_->b.memory.data())));
    EXPECT_EQ(pair_->a.worker->stats().staged_transfers, 2u);
  }
  // A machine where the module is loaded, with the adapter behind the GPU's switch.
  TemporaryFolder& with_peermem() {
    machine_.emplace();
    machine_->file("/sys/module/nvidia_peermem/refcnt", "0");
    return *machine_;
  }
  // Both ends register and one transfer each way is right; nothing was staged.
  void check_direct(const std::string& said) {
    TransferRequest request;
    write_across(request);
    if (HasFatalFailure()) return;
    gpu_->write(far_, pattern(6));
    request.op = Op::kRead;
    ASSERT_TRUE(pair_->run(request).ok());
    EXPECT_TRUE(gpu_->read(near_, kBytes) == pattern(6));
    EXPECT_EQ(pair_->a.worker->stats().staged_transfers, 0u);
    EXPECT_THAT(pair_->a.worker->explain(pair_->a.peer), HasSubstr(said));
  }
  std::string pattern(int seed) {
    pair_->fill(seed);
    return {reinterpret_cast<const char*>(pair_->a.memory.data()), kBytes};
  }

  // The next case is on a machine without the module.
  void end_case() {
    TearDown();
    machine_.reset();
    locality_.reset();
  }

  std::optional<TemporaryFolder> machine_;
  std::shared_ptr<const verbs::Locality> locality_;
  VerbsPair::Settings settings_;
};

TEST_F(DeviceMemoryOverVerbs, MovesBothWaysWithEitherSideOnADevice) {
  start();
  const MemoryRegion near = must(give(pair_->a, near_)), far = must(give(pair_->b, far_));
  EXPECT_EQ(near.place, (MemoryPlace{MemoryKind::kDevice, 0}));
  // Two, and one of our own at each adapter by which it is proved.
  EXPECT_EQ(pair_->fake->stats().dma_bufs, 4u);
  const RemoteRegion remote = *pair_->b.worker->remote_region(far);

  TransferRequest request = pair_->request(Op::kWrite);  // host to device
  const std::string first = pattern(3);
  request.remote = remote;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(far_, kBytes) == first);

  request = pair_->request(Op::kRead);  // device to device
  request.local = near;
  request.remote = remote;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(near_, kBytes) == first);

  const std::string second = pattern(40);
  gpu_->write(near_, second);
  request = pair_->request(Op::kWrite);  // device to host
  request.local = near;
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(std::equal(second.begin(), second.end(),
                         reinterpret_cast<const char*>(pair_->b.memory.data())));
  EXPECT_LE(gpu_->largest_copy(), 4096u) << "the adapter moves it; copies only prove that it can";
}

TEST_F(DeviceMemoryOverVerbs, APartInsideAnAllocationKeepsItsBounds) {
  start();
  constexpr size_t kAt = 3 * 4096 + 64;
  const auto far = must(give(pair_->b, far_ + kAt, 1000));
  const std::string sent = pattern(9);
  const std::string before = gpu_->read(far_, kBytes);
  TransferRequest request = pair_->request(Op::kWrite, 1000);
  request.remote = *pair_->b.worker->remote_region(far);
  ASSERT_TRUE(pair_->run(request).ok());
  EXPECT_TRUE(gpu_->read(far_, kBytes) ==
              before.substr(0, kAt) + sent.substr(0, 1000) + before.substr(kAt + 1000));
}

TEST_F(DeviceMemoryOverVerbs, WhereNoWayReachesItItIsStagedAndTheReasonIsSaid) {
  gpudirect::Attributes late = gpudirect::unordered_writes();
  late[gpudirect::kRdmaFlushWritesOptions] = 2;  // by streams alone
  gpudirect::Attributes closed = gpudirect::without_dma_buf();
  closed[gpudirect::kRdmaSupported] = 0;
  struct Case {
    const char* said;
    gpudirect::FakeOptions device;
    FakeOptions adapters;
    bool module = false;
  };
  for (const Case& each :
       {Case{"CUDA device 0 exports none", {.attributes = gpudirect::without_dma_buf()}},
        {"modprobe nvidia-peermem", {.attributes = gpudirect::without_dma_buf()}},
        {"offers no flush to the host", {.attributes = late}},
        {"BAR1", {}, {.window_bytes = kBytes / 2}},
        {"no dma-buf", {}, {.dma_buf = false}},
        {"does not let adapters access its memory", {.attributes = closed}, {}, true}}) {
    SCOPED_TRACE(each.said);
    if (each.module) with_peermem();
    start(each.device, each.adapters);
    check_staged(each.said);
    // Registered memory of the host is not what there is too little of.
    EXPECT_THAT(pair_->a.worker->explain(pair_->a.peer), testing::Not(HasSubstr("MEMLOCK")));
    end_case();
  }
}

// With the module, where there is no dma-buf on either side; which comes first where there is.
TEST_F(DeviceMemoryOverVerbs, WithoutADmaBufItIsGivenByItsAddress) {
  struct Case {
    const char* said;
    gpudirect::FakeOptions device;
    FakeOptions adapters;
  };
  for (const Case& each : {Case{"by nvidia-peermem", {.attributes = gpudirect::without_dma_buf()}},
                           {"by nvidia-peermem", {}, {.dma_buf = false}},
                           {"by dma-buf"}}) {
    with_peermem();
    start(each.device, each.adapters);
    check_direct(absl::StrCat("1 of CUDA device 0 ", each.said));
    EXPECT_EQ(pair_->fake->stats().by_address >= 2, each.said != std::string_view("by dma-buf"));
    end_case();
  }
}

// A registration that succeeds and lies is found out, and the next way is tried.
// Promise(devices): An adapter that registers device memory but moves wrong bytes is not used for
//   it | a queue pair to itself reads both ends of each registration
TEST_F(DeviceMemoryOverVerbs, ARegistrationThatLiesIsNotUsed) {
  using Worth = FakeOptions::Worth;
  struct Case {
    Worth worth;
    const char* said;
  };
  for (const Case& each : {Case{Worth::kRefused, "completion status"},
                           {Worth::kElsewhere, "a read returned wrong bytes"},
                           {Worth::kWritesElsewhere, "a write did not arrive"}}) {
    SCOPED_TRACE(each.said);
    start({}, {.dma_buf_worth = each.worth});
    check_staged(each.said);
    EXPECT_THAT(pair_->a.worker->explain(pair_->a.peer), HasSubstr("by dma-buf"));
    TearDown();
    with_peermem();
    start({}, {.dma_buf_worth = each.worth});
    check_direct("by nvidia-peermem");
    TearDown();
    start({}, {.dma_buf_worth = each.worth, .address_worth = each.worth});
    check_staged("by nvidia-peermem");
    end_case();
  }
}

// Nobody but the owner writes to memory that is registered.
TEST_F(DeviceMemoryOverVerbs, ProvingLeavesTheMemoryAsItWas) {
  start();
  const std::string before = pattern(11);
  gpu_->write(near_, before);
  ASSERT_TRUE(give(pair_->a, near_).ok());
  ASSERT_TRUE(give(pair_->a, near_ + 100, 1).ok());
  EXPECT_TRUE(gpu_->read(near_, kBytes) == before);
}

// Two adapters: one behind the GPU's switch, one at the other socket.
TEST_F(DeviceMemoryOverVerbs, TheNearAdapterGetsMoreOfADevice) {
  constexpr const char* kSwitch = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0";
  TemporaryFolder& machine = with_peermem();
  const auto link = [&](const std::string& from, const std::string& to) {
    const std::filesystem::path at = machine.path(from);
    std::filesystem::create_directories(at.parent_path());
    std::filesystem::create_directory_symlink(machine.path(to), at);
  };
  const std::string gpu = std::string(kSwitch) + "/0000:02:00.0/0000:1b:00.0";
  const std::string near = std::string(kSwitch) + "/0000:02:01.0/0000:03:00.0";
  const std::string far = "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0";
  machine.file(gpu + "/numa_node", "0")
      .file(near + "/numa_node", "0")
      .file(far + "/numa_node", "1");
  link("/sys/bus/pci/devices/0000:1b:00.0", gpu);
  link("/sys/class/infiniband/fake0/device", far);
  link("/sys/class/infiniband/fake1/device", near);
  settings_ = {{"verbs.slice_kib", "64"}};
  start({}, {.devices = 2});
  const auto from = give(pair_->a, near_);
  const auto to = give(pair_->b, far_);
  ASSERT_TRUE(from.ok() && to.ok());
  const auto moved = [&](size_t device) { return pair_->fake->moved(device); };
  const uint64_t before[] = {moved(0), moved(1)};
  TransferRequest request = pair_->request(Op::kWrite);
  request.local = *from;
  request.remote = *pair_->b.worker->remote_region(*to);
  ASSERT_TRUE(pair_->run(request).ok());
  const auto far_bytes = static_cast<double>(moved(0) - before[0]);
  const auto near_bytes = static_cast<double>(moved(1) - before[1]);
  EXPECT_NEAR(near_bytes / (near_bytes + far_bytes), 0.8, 0.1);
  EXPECT_THAT(
      pair_->a.worker->explain(pair_->a.peer),
      AllOf(HasSubstr("behind one PCIe switch (PIX)"), HasSubstr("across NUMA nodes (SYS)")));
}

}  // namespace
}  // namespace baton
