// Each part of gpudirect as one program over the fake.
#include "tests/gpudirect/flows/flows.h"

#include "gpudirect/contract/kernel_sums.h"
#include "gpudirect/contract/memory_place.h"
#include "gpudirect/contract/peer_mapping.h"
#include "gpudirect/contract/slab_buffer.h"
#include "gpudirect/contract/staging.h"
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/copies/copier.h"
#include "tests/std.h"

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
absl::Status late() { return absl::DeadlineExceededError("it does not end"); }

absl::Span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A slab, and pinned memory that fills it and looks at it.
absl::Status buffer(FakeDriver&, const Driver& driver) {
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto made = SlabBuffer::create(**device, 600'000);
  if (!made.ok()) return made.status();
  const std::string sent = pattern(400'000, 3);
  absl::Status status = (*made)->put(0, bytes_of(sent));
  if (status.ok()) status = (*made)->put(sent.size(), bytes_of(pattern(200'000, 4)));
  std::string back(sent.size(), '\0');
  if (status.ok()) {
    status = (*made)->get(0, {reinterpret_cast<std::byte*>(back.data()), back.size()});
  }
  if (!status.ok()) return status;
  return back == sent ? absl::OkStatus() : wrong();
}

// Many copies at once, urgent ones among them, there and back.
absl::Status ring(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kPieces = 6;
  constexpr size_t kPiece = 4096;
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto slab = DeviceSlab::create(**device, kMiB);
  if (!slab.ok()) return slab.status();
  const auto ring = PinnedRing::create(**device, 2 * kPieces * kPiece);
  if (!ring.ok()) return ring.status();
  std::byte* const host = (*ring)->memory().data();
  auto* const there = pointer_of<std::byte>((*slab)->span().data);
  const std::string sent = pattern(kPieces * kPiece, 11);
  std::copy(sent.begin(), sent.end(), reinterpret_cast<char*>(host));
  absl::Status status;
  for (const auto direction :
       {internal::CopyDirection::kToDevice, internal::CopyDirection::kToHost}) {
    const bool back = direction == internal::CopyDirection::kToHost;
    for (size_t i = 0; i < kPieces; ++i) {
      const internal::CopyRun run{there + i * kPiece, host + ((back ? kPieces : 0) + i) * kPiece,
                                  kPiece};
      (*ring)->copy(direction, i, i % 3 == 2, {&run, 1});
    }
    for (int n = 0; (*ring)->busy(); ++n) {
      (*ring)->progress([&](uint64_t piece, const absl::Status& ended) {
        status.Update(ended);
        if (!ended.ok()) return;
        const auto* const copied = reinterpret_cast<const char*>(host) + (kPieces + piece) * kPiece;
        const std::string found =
            back ? std::string(copied, kPiece)
                 : fake.read(reinterpret_cast<uintptr_t>(there + piece * kPiece), kPiece);
        if (found != sent.substr(piece * kPiece, kPiece)) status.Update(wrong());
      });
      if (n > kPatience) return late();
    }
    if (!status.ok()) return status;
  }
  return status;
}

// Every way of copying lists of pieces, in the three directions.
absl::Status lists(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kPieces = 24;
  constexpr size_t kPiece = 512;
  constexpr size_t kApart = 1024;
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto launcher = Launcher::load(**device, FakeDriver::image());
  if (!launcher.ok()) return launcher.status();
  const auto slab = DeviceSlab::create(**device, kMiB);
  if (!slab.ok()) return slab.status();
  const auto pages = RegisteredPages::make(**device, kPieces * kApart);
  if (!pages.ok()) return pages.status();
  const auto copier =
      Copier::open(**device, launcher->get(), (*device)->stream(Direction::kToHost));
  if (!copier.ok()) return copier.status();
  const DevicePointer there = (*slab)->span().data;
  const DevicePointer other = there + kMiB / 2;
  const DevicePointer here = (*pages)->address();
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
        std::copy(sent.begin(), sent.end(), (*pages)->as<char>());
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
        result = (*copier)->copy_by(way, route, absl::MakeSpan(pieces).subspan(i, at_once));
      }
      // And one more, for which there is none until the first launch has read its own.
      if (launches && result.ok()) {
        const auto last = absl::MakeSpan(pieces).subspan(kPieces - 2);
        if (absl::Status more = (*copier)->copy_by(way, route, last);
            !absl::IsFailedPrecondition(more)) {
          result = std::move(more);
        }
      }
      wait_for_stream(**device, Direction::kToHost);
      if (!result.ok()) return result;
      for (const CopyPiece& piece : pieces) {
        const std::string expected = sent.substr(piece.from - from, piece.bytes);
        const std::string found =
            route == CopyRoute::kToHost
                ? std::string((*pages)->as<char>() + (piece.to - to), piece.bytes)
                : fake.read(piece.to, piece.bytes);
        if (found != expected) return wrong();
      }
    }
  }
  return absl::OkStatus();
}

// A transfer waits for a stream, then a stream for a transfer.
absl::Status gated(FakeDriver& fake, const Driver& driver) {
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto slab = DeviceSlab::create(**device, kMiB);
  if (!slab.ok()) return slab.status();
  const DevicePointer at = (*slab)->span().data;
  Stream stream = nullptr;
  absl::Status status;
  {
    const Device::Current current(**device);
    status = current.status();
    if (status.ok()) {
      status = (*device)->check(driver.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0),
                                "making a user's stream");
    }
  }
  if (!status.ok()) return status;
  const auto copy = [&](size_t to, size_t from) {
    const Device::Current current(**device);
    if (!current.status().ok()) return current.status();
    return (*device)->check(driver.cuMemcpyAsync(at + to, at + from, 5, stream), "a user's copy");
  };
  auto gates = StreamGates::open(**device, 3);
  status = gates.status();
  const auto use = [&]() -> absl::Status {
    fake.write(at, "first");
    if (absl::Status queued = copy(100, 0); !queued.ok()) return queued;
    const auto gate = (*gates)->after_stream(stream, kLater);
    if (!gate.ok()) return gate.status();
    std::optional<absl::Status> passed;
    for (int n = 0; !(passed = (*gates)->passed(*gate, Time{0})).has_value(); ++n) {
      if (n > kPatience) return late();
    }
    if (!passed->ok()) return *passed;
    if (fake.read(at + 100, 5) != "first") return wrong();
    (*gates)->close(*gate);
    const auto hold = (*gates)->hold(stream, kLater);
    if (!hold.ok()) return hold.status();
    if (absl::Status queued = copy(200, 0); !queued.ok()) return queued;
    fake.run_all();
    fake.write(at, "other");  // the transfer delivers
    (*gates)->end(hold->gate, true);
    fake.run_all();
    if (*pointer_of<const uint64_t>(hold->outcome.address) != hold->outcome.delivered)
      return wrong();
    if (fake.read(at + 200, 5) != "other") return wrong();
    (*gates)->close(hold->gate);
    // The same gate once more: the stream waits, and not for what was released before.
    const auto again = (*gates)->hold(stream, kLater);
    if (!again.ok()) return again.status();
    if (absl::Status queued = copy(300, 0); !queued.ok()) return queued;
    fake.run_all();
    return fake.queued() == 3 ? absl::OkStatus() : absl::DataLossError("the stream did not wait");
  };
  if (status.ok()) status = use();
  // What waits still goes on when the gates end, and nothing of theirs goes before that.
  if (gates.ok()) gates->reset();
  fake.run_all();
  if (status.ok() && fake.read(at + 300, 5) != "other") status = wrong();
  (*device)->give_back([&] { driver.cuStreamDestroy(stream); });
  return status;
}

// An allocation is handed over, mapped, written and given back.
absl::Status peers(FakeDriver& fake, const Driver& driver) {
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto theirs = DeviceSlab::create(**device, kMiB);
  if (!theirs.ok()) return theirs.status();
  const auto ours = DeviceSlab::create(**device, kMiB);
  if (!ours.ok()) return ours.status();
  const DevicePointer at = (*theirs)->span().data;
  const auto facts = query_pointer(driver, at);
  if (!facts.ok()) return facts.status();
  const auto shared = export_allocation(**device, at, *facts);
  if (!shared.ok()) return shared.status();
  const auto mapped = ImportedAllocation::map(**device, *shared);
  close(shared->fd);
  if (!mapped.ok()) return mapped.status();
  const auto copies = StreamCopies::create(**device);
  if (!copies.ok()) return copies.status();
  const std::string sent = pattern(8192, 5);
  fake.write((*ours)->span().data, sent);
  for (size_t slot = 0; slot < 2; ++slot) {
    const internal::DeviceRun run{.to = (*mapped)->data() + slot * 4096,
                                  .from = pointer_of<std::byte>((*ours)->span().data) + slot * 4096,
                                  .bytes = 4096};
    if (absl::Status status = (*copies)->begin(slot, {&run, 1}); !status.ok()) return status;
  }
  for (size_t slot = 0; slot < 2; ++slot) {
    std::optional<absl::Status> ended;
    for (int n = 0; !(ended = (*copies)->ended(slot)).has_value(); ++n) {
      if (n > kPatience) return late();
    }
    if (!ended->ok()) return *ended;
    if (fake.read(at + slot * 4096, 4096) != sent.substr(slot * 4096, 4096)) return wrong();
  }
  return absl::OkStatus();
}

// An adapter writes through a dma-buf, late, and the device is asked to look.
absl::Status adapter(FakeDriver& fake, const Driver& driver) {
  const CudaMemory memory([&] { return &driver; });
  const auto slab = memory.allocate(0, kMiB);
  if (!slab.ok()) return slab.status();
  std::byte* const at = (*slab)->data();
  const auto place = memory.place(at, kMiB);
  if (!place.ok()) return place.status();
  if (place->kind != MemoryKind::kDevice) return wrong();
  const std::string before = pattern(kMiB, 2);
  if (absl::Status put = (*slab)->put(0, bytes_of(before)); !put.ok()) return put;
  const auto file = memory.dma_buf(at, 4096);
  if (!file.ok()) return file.status();
  const off_t begin = lseek(file->fd, 0, SEEK_CUR) + static_cast<off_t>(file->offset);
  void* const seen = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, begin);
  close(file->fd);
  if (seen == MAP_FAILED) return wrong();
  const std::string sent = pattern(4096, 9);
  fake.on_flush([&] { std::copy(sent.begin(), sent.end(), static_cast<char*>(seen)); });
  absl::Status status;
  const auto wants = memory.wants_flush(0);
  status.Update(wants.status());
  if (status.ok() && *wants) status = memory.flush(0);
  fake.on_flush(nullptr);
  munmap(seen, 4096);
  if (!status.ok()) return status;
  const std::string found = fake.read(reinterpret_cast<uintptr_t>(at), kMiB);
  return found == sent + before.substr(4096) ? absl::OkStatus() : wrong();
}

// Sums of what is pinned, what is not, and what is on the device, in two slots at a time.
absl::Status sums(FakeDriver& fake, const Driver& driver) {
  constexpr size_t kCount = 700;
  const auto device = Device::open(driver, 0);
  if (!device.ok()) return device.status();
  const auto launcher = Launcher::load(**device, FakeDriver::image());
  if (!launcher.ok()) return launcher.status();
  const auto slab = DeviceSlab::create(**device, kMiB);
  if (!slab.ok()) return slab.status();
  const auto costs = measure_sums(**device, **launcher, 8192, 1);
  if (!costs.ok()) return costs.status();
  const std::string loose = pattern(kCount, 1), there = pattern(kCount, 2);
  std::string pinned = pattern(3 * kCount, 3), result(kCount, 0);
  auto* const host = reinterpret_cast<std::byte*>(pinned.data());
  const auto sums = KernelSums::create(**device, **launcher, {}, *costs);
  if (!sums.ok()) return sums.status();
  if (absl::Status status = (*sums)->pin({host, pinned.size()}); !status.ok()) return status;
  fake.write((*slab)->span().data, there);
  const std::array<internal::VectorSum::Source, 3> sources = {
      {{reinterpret_cast<const std::byte*>(loose.data()), false},
       {host, false},
       {pointer_of<std::byte>((*slab)->span().data), true}}};
  internal::VectorSum sum{.element = internal::VectorSum::Element::kU8,
                          .count = kCount,
                          .sources = sources,
                          .target = host + kCount};
  absl::Status status = (*sums)->begin(0, sum);
  sum.target = reinterpret_cast<std::byte*>(result.data());
  if (status.ok()) status = (*sums)->begin(1, sum);
  for (size_t slot = 0; slot < 2; ++slot) {
    std::optional<absl::Status> ended;
    for (int n = 0; !(ended = (*sums)->ended(slot)).has_value(); ++n) {
      if (n > kPatience) return late();
    }
    status.Update(*ended);
  }
  if (!status.ok()) return status;
  for (size_t i = 0; i < kCount; ++i) {
    const auto right = static_cast<char>(loose[i] + pinned[i] + there[i]);
    if (result[i] != right || pinned[kCount + i] != right) return wrong();
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const Flow> flows() {
  static constexpr Flow kFlows[] = {
      {"buffer", buffer},
      {"ring", ring},
      {"lists", lists},
      {"gated", gated},
      {"peers", peers},
      {"sums", sums},
      {"adapter", adapter, unordered_writes},
  };
  return kFlows;
}

}  // namespace baton::gpudirect
