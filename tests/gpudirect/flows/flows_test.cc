// Each part of gpudirect as one program over the fake.
#include "tests/gpudirect/flows/flows.h"
#include "gpudirect/contract/kernel_sums.h"
#include "gpudirect/contract/memory_place.h"
#include "gpudirect/contract/peer_mapping.h"
#include "gpudirect/contract/staging.h"
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/copies/copier.h"
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/must.h"
#include "tests/sanitized.h"
#include "tests/std.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

constexpr int kPatience = 100'000;  // questions
constexpr Time kLater{1'000'000};

std::string pattern(size_t bytes, int seed) {
  std::string out(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<char>((i * 7 + seed) % 251);
  return out;
}

absl::Status wrong() { return absl::DataLossError("other bytes than were sent"); }
void expect(bool right) {
  if (!right) throw Failed(wrong());
}
// What it answers at last.
template <typename Ask>
absl::Status end_of(const Ask& ask) {
  for (int n = 0; n <= kPatience; ++n) {
    if (std::optional<absl::Status> ended = ask()) return *std::move(ended);
  }
  throw Failed(absl::DeadlineExceededError("it does not end"));
}
template <typename Run>
absl::Status said_by(const Run& run) {
  try {
    run();
  } catch (const Failed& failed) {
    return failed.status;
  }
  return absl::OkStatus();
}

absl::Span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A slab, and pinned memory that fills it and looks at it.
void buffer(FakeDriver&, const Driver& driver) {
  const auto device = must(Device::open(driver, 0));
  const auto made = must(SlabBuffer::create(*device, 600'000));
  const std::string sent = pattern(400'000, 3);
  must(made->put(0, bytes_of(sent)));
  must(made->put(sent.size(), bytes_of(pattern(200'000, 4))));
  std::string back(sent.size(), '\0');
  must(made->get(0, {reinterpret_cast<std::byte*>(back.data()), back.size()}));
  expect(back == sent);
}

// Many copies at once, urgent ones among them, there and back.
void ring(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kPieces = 6;
  constexpr size_t kPiece = 4096;
  const auto device = must(Device::open(driver, 0));
  const auto slab = must(DeviceSlab::create(*device, kMiB));
  const auto ring = must(PinnedRing::create(*device, 2 * kPieces * kPiece));
  std::byte* const host = ring->memory().data();
  auto* const there = pointer_of<std::byte>(slab->span().data);
  const std::string sent = pattern(kPieces * kPiece, 11);
  std::copy(sent.begin(), sent.end(), reinterpret_cast<char*>(host));
  for (const auto direction :
       {internal::CopyDirection::kToDevice, internal::CopyDirection::kToHost}) {
    const bool back = direction == internal::CopyDirection::kToHost;
    for (size_t i = 0; i < kPieces; ++i) {
      const internal::CopyRun run{there + i * kPiece, host + ((back ? kPieces : 0) + i) * kPiece,
                                  kPiece};
      ring->copy(direction, i, i % 3 == 2, {&run, 1});
    }
    absl::Status status;
    const auto look = [&](uint64_t piece, const absl::Status& ended) {
      status.Update(ended);
      if (!ended.ok()) return;
      const auto* const copied = reinterpret_cast<const char*>(host) + (kPieces + piece) * kPiece;
      const std::string found =
          back ? std::string(copied, kPiece)
               : fake.read(reinterpret_cast<uintptr_t>(there + piece * kPiece), kPiece);
      if (found != sent.substr(piece * kPiece, kPiece)) status.Update(wrong());
    };
    must(end_of([&]() -> std::optional<absl::Status> {
      ring->progress(look);
      if (ring->busy()) return std::nullopt;
      return status;
    }));
  }
}

// Every way of copying lists of pieces, in the three directions.
void lists(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kPieces = 24;
  constexpr size_t kPiece = 512;
  constexpr size_t kApart = 1024;
  const auto device = must(Device::open(driver, 0));
  const auto launcher = must(Launcher::load(*device, FakeDriver::image()));
  const auto slab = must(DeviceSlab::create(*device, kMiB));
  const auto pages = must(RegisteredPages::make(*device, kPieces * kApart));
  const auto copier =
      must(Copier::open(*device, launcher.get(), device->stream(Direction::kToHost)));
  const DevicePointer there = slab->span().data;
  const DevicePointer other = there + kMiB / 2;
  const DevicePointer here = pages->address();
  absl::Status result;
  int seed = 0;
  for (const CopyWay way :
       {CopyWay::kSingle, CopyWay::kRows, CopyWay::kBatch, CopyWay::kPacked, CopyWay::kKernel}) {
    for (const CopyRoute route : {CopyRoute::kToDevice, CopyRoute::kOnDevice, CopyRoute::kToHost}) {
      const bool packs = way == CopyWay::kPacked;
      if (packs && route == CopyRoute::kOnDevice) continue;
      const std::string sent = pattern(kPieces * kApart, ++seed);
      const bool up = route == CopyRoute::kToDevice;
      const DevicePointer from = up ? here : there;
      const DevicePointer to = route == CopyRoute::kToHost ? here : up ? there : other;
      if (up) {
        std::copy(sent.begin(), sent.end(), pages->as<char>());
      } else {
        fake.write(there, sent);
      }
      std::vector<CopyPiece> pieces;
      for (size_t i = 0; i < kPieces; ++i) {
        // What is packed lies in one row at the host.
        const size_t in_row = i * kPiece;
        const size_t apart = i * kApart;
        pieces.push_back(
            {from + (packs && up ? in_row : apart), to + (packs && !up ? in_row : apart), kPiece});
      }
      // With kernels as many lists as there are, each with some of the pieces.
      const bool launches = way == CopyWay::kKernel && route != CopyRoute::kToHost;
      const size_t at_once = launches ? kPieces / Copier::kLists : kPieces;
      for (size_t i = 0; i < kPieces && result.ok(); i += at_once) {
        result = copier->copy_by(way, route, absl::MakeSpan(pieces).subspan(i, at_once));
      }
      // And one more, for which there is none until the first launch has read its own.
      if (launches && result.ok()) {
        const auto last = absl::MakeSpan(pieces).subspan(kPieces - 2);
        if (absl::Status more = copier->copy_by(way, route, last);
            !absl::IsFailedPrecondition(more)) {
          result = std::move(more);
        }
      }
      wait_for_stream(*device, Direction::kToHost);
      must(result);
      for (const CopyPiece& piece : pieces) {
        const std::string expected = sent.substr(piece.from - from, piece.bytes);
        const std::string found =
            route == CopyRoute::kToHost
                ? std::string(pages->as<char>() + (piece.to - to), piece.bytes)
                : fake.read(piece.to, piece.bytes);
        expect(found == expected);
      }
    }
  }
}

// A transfer waits for a stream, then a stream for a transfer.
void gated(FakeDriver& fake, const Driver& driver) {
  const auto device = must(Device::open(driver, 0));
  const auto slab = must(DeviceSlab::create(*device, kMiB));
  const DevicePointer at = slab->span().data;
  Stream stream = nullptr;
  {
    const Device::Current current(*device);
    must(current.status());
    must(device->check(driver.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0),
                       "making a user's stream"));
  }
  const auto copy = [&](size_t to, size_t from) {
    const Device::Current current(*device);
    must(current.status());
    must(device->check(driver.cuMemcpyAsync(at + to, at + from, 5, stream), "a user's copy"));
  };
  auto gates = StreamGates::open(*device, 3);
  const auto use = [&] {
    must(gates.status());
    fake.write(at, "first");
    copy(100, 0);
    const auto gate = must((*gates)->after_stream(stream, kLater));
    must(end_of([&] { return (*gates)->passed(gate, Time{0}); }));
    expect(fake.read(at + 100, 5) == "first");
    (*gates)->close(gate);
    const auto hold = must((*gates)->hold(stream, kLater));
    copy(200, 0);
    fake.run_all();
    fake.write(at, "other");  // the transfer delivers
    (*gates)->end(hold.gate, true);
    fake.run_all();
    expect(*pointer_of<const uint64_t>(hold.outcome.address) == hold.outcome.delivered);
    expect(fake.read(at + 200, 5) == "other");
    (*gates)->close(hold.gate);
    // The same gate once more: the stream waits, and not for what was released before.
    must((*gates)->hold(stream, kLater));
    copy(300, 0);
    fake.run_all();
    if (fake.queued() != 3) throw Failed(absl::DataLossError("the stream did not wait"));
  };
  const absl::Status status = said_by(use);
  // What waits still goes on when the gates end, and nothing of theirs goes before that.
  if (gates.ok()) gates->reset();
  fake.run_all();
  const bool went_on = fake.read(at + 300, 5) == "other";
  device->give_back([&] { driver.cuStreamDestroy(stream); });
  must(status);
  expect(went_on);
}

// An allocation is handed over, mapped, written and given back.
void peers(FakeDriver& fake, const Driver& driver) {
  const auto device = must(Device::open(driver, 0));
  const auto theirs = must(DeviceSlab::create(*device, kMiB));
  const auto ours = must(DeviceSlab::create(*device, kMiB));
  const DevicePointer at = theirs->span().data;
  const auto shared = must(export_allocation(*device, at, must(query_pointer(driver, at))));
  auto imported = ImportedAllocation::map(*device, shared);
  close(shared.fd);
  const auto mapped = must(std::move(imported));
  const auto copies = must(StreamCopies::create(*device));
  const std::string sent = pattern(8192, 5);
  fake.write(ours->span().data, sent);
  for (size_t slot = 0; slot < 2; ++slot) {
    const internal::DeviceRun run{.to = mapped->data() + slot * 4096,
                                  .from = pointer_of<std::byte>(ours->span().data) + slot * 4096,
                                  .bytes = 4096};
    must(copies->begin(slot, {&run, 1}));
  }
  for (size_t slot = 0; slot < 2; ++slot) {
    must(end_of([&] { return copies->ended(slot); }));
    expect(fake.read(at + slot * 4096, 4096) == sent.substr(slot * 4096, 4096));
  }
}

// An adapter writes through a dma-buf, late, and the device is asked to look.
void adapter(FakeDriver& fake, const Driver& driver) {
  const CudaMemory memory([&] { return &driver; });
  const auto slab = must(memory.allocate(0, kMiB));
  std::byte* const at = slab->data();
  expect(must(memory.place(at, kMiB)).kind == MemoryKind::kDevice);
  const std::string before = pattern(kMiB, 2);
  must(slab->put(0, bytes_of(before)));
  const auto file = must(memory.dma_buf(at, 4096));
  const off_t begin = lseek(file.fd, 0, SEEK_CUR) + static_cast<off_t>(file.offset);
  void* const seen = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, begin);
  close(file.fd);
  expect(seen != MAP_FAILED);
  const std::string sent = pattern(4096, 9);
  fake.on_flush([&] { std::copy(sent.begin(), sent.end(), static_cast<char*>(seen)); });
  const absl::Status status = said_by([&] {
    if (must(memory.wants_flush(0))) must(memory.flush(0));
  });
  fake.on_flush(nullptr);
  munmap(seen, 4096);
  must(status);
  expect(fake.read(reinterpret_cast<uintptr_t>(at), kMiB) == sent + before.substr(4096));
}

// Sums of what is pinned, what is not, and what is on the device, in two slots at a time.
void sums(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kCount = 700;
  const auto device = must(Device::open(driver, 0));
  const auto launcher = must(Launcher::load(*device, FakeDriver::image()));
  const auto slab = must(DeviceSlab::create(*device, kMiB));
  const auto costs = must(measure_sums(*device, *launcher, 8192, 1));
  const std::string loose = pattern(kCount, 1), there = pattern(kCount, 2);
  std::string pinned = pattern(3 * kCount, 3), result(kCount, 0);
  auto* const host = reinterpret_cast<std::byte*>(pinned.data());
  const auto sums = must(KernelSums::create(*device, *launcher, {}, costs));
  must(sums->pin({host, pinned.size()}));
  fake.write(slab->span().data, there);
  const std::array<internal::VectorSum::Source, 3> sources = {
      {{reinterpret_cast<const std::byte*>(loose.data()), false},
       {host, false},
       {pointer_of<std::byte>(slab->span().data), true}}};
  internal::VectorSum sum{.element = internal::VectorSum::Element::kU8,
                          .count = kCount,
                          .sources = sources,
                          .target = host + kCount};
  absl::Status status = sums->begin(0, sum);
  sum.target = reinterpret_cast<std::byte*>(result.data());
  if (status.ok()) status = sums->begin(1, sum);
  for (size_t slot = 0; slot < 2; ++slot) {
    status.Update(end_of([&] { return sums->ended(slot); }));
  }
  must(status);
  for (size_t i = 0; i < kCount; ++i) {
    const auto right = static_cast<char>(loose[i] + pinned[i] + there[i]);
    expect(result[i] == right && pinned[kCount + i] == right);
  }
}

template <void (*kFlow)(FakeDriver&, const Driver&)>
absl::Status run(FakeDriver& fake, const Driver& driver) {
  return said_by([&] { kFlow(fake, driver); });
}

}  // namespace

std::span<const Flow> flows() {
  static constexpr Flow kFlows[] = {
      {"buffer", run<buffer>},
      {"ring", run<ring>},
      {"lists", run<lists>},
      {"gated", run<gated>},
      {"peers", run<peers>},
      {"sums", run<sums>},
      {"adapter", run<adapter>, unordered_writes},
  };
  return kFlows;
}

// Whatever call of the driver fails, wherever gpudirect is: an error is said or all is done, and
// nothing is left behind or breaks a rule.

namespace {

// Promise(devices): Nothing of the driver's is leaked after any failing call | the fake driver
//   forgives no leak
TEST(EveryCall, ThatFailsIsSaidOrDoneAllTheSameAndLeavesNothingBehind) {
  const uint64_t every = kSanitized ? 3 : 1;
  for (const Flow& flow : flows()) {
    uint64_t calls = 0;
    size_t said = 0;
    for (uint64_t k = 0; k <= calls; ++k) {
      if (k == 1 || (k != 0 && k % every != 0)) continue;  // the first is cuInit
      SCOPED_TRACE(testing::Message() << flow.name << ", call " << k);
      FakeDriver fake({.attributes = flow.attributes(), .fail_call = k});
      const absl::Status status = flow.run(fake, FakeDriver::driver());
      EXPECT_FALSE(absl::IsDataLoss(status)) << status;
      EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
      EXPECT_THAT(fake.finish(), testing::IsEmpty()) << status;
      if (k == 0) {
        ASSERT_TRUE(status.ok()) << status;
        calls = fake.calls();
      }
      said += status.ok() ? 0 : 1;
    }
    EXPECT_GT(said, 30u / every) << flow.name;
  }
}

// All of gpudirect beside an application that uses CUDA too: what it records, and the contexts of
// its own, are as if nobody else were there.

// Promise(devices): Recording a CUDA graph in the application is not disturbed by transfers | calls
//   use the device's context and relaxed mode, then restore both
TEST(Applications, RecordGraphsMeanwhileOnWhicheverThread) {
  for (const bool on_this_thread : {false, true}) {
    for (const Flow& flow : flows()) {
      SCOPED_TRACE(flow.name);
      CleanDriver fake({.attributes = flow.attributes()});
      const FakeDriver::UsersRecording recording(fake, on_this_thread);
      EXPECT_EQ(flow.run(fake, FakeDriver::driver()), absl::OkStatus());
      EXPECT_TRUE(recording.intact());
    }
  }
}

TEST(Applications, HaveTheContextCurrentThatTheyHadBefore) {
  for (const Flow& flow : flows()) {
    SCOPED_TRACE(flow.name);
    CleanDriver fake({.devices = 2, .attributes = flow.attributes()});
    const Driver driver = FakeDriver::driver();
    for (const int device : {0, 1}) {
      const Context users = fake.make_context(device);
      ASSERT_EQ(driver.cuCtxPushCurrent(users), kSuccess);
      EXPECT_EQ(flow.run(fake, driver), absl::OkStatus());
      Context popped = nullptr;
      ASSERT_EQ(driver.cuCtxPopCurrent(&popped), kSuccess);
      EXPECT_EQ(popped, users);
      EXPECT_FALSE(FakeDriver::has_current());
    }
  }
}

// An old driver has no mode of threads, and does what it did.
TEST(Applications, AreNotAskedWhereTheDriverHasNoWordForIt) {
  CleanDriver fake({.missing = {"cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"}});
  for (const Flow& flow : flows()) {
    const absl::Status status = flow.run(fake, FakeDriver::driver());
    EXPECT_TRUE(status.ok() || flow.attributes != h100) << flow.name << ": " << status;
  }
}

}  // namespace

}  // namespace baton::gpudirect
