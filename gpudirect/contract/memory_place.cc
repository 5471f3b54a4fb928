// Implements the transport's DeviceMemory with CUDA's driver: where addresses lie, dma-bufs, IPC,
// copies.
#include "gpudirect/contract/memory_place.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpudirect/contract/kernel_sums.h"
#include "gpudirect/contract/peer_mapping.h"
#include "gpudirect/contract/staging.h"
#include "gpudirect/contract/stream_gates.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/facts.h"
#include "transport/base/log.h"
#include "transport/internal/mapped.h"

namespace baton::gpudirect {
namespace {

DevicePointer address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

const Driver* driver_of_process() {
  if (!driver_in_process()) return nullptr;
  const absl::StatusOr<const Driver*> driver = machine_driver();
  return driver.ok() ? *driver : nullptr;
}

// Stays for as long as the process: workers may end after static objects do.
const internal::DeviceMemory* make() {
  const auto* memory = new CudaMemory(driver_of_process);
  internal::use_device_memory(memory);
  return memory;
}

}  // namespace

// Named for the linker, which would leave out what no code calls: see cmake/BatonTargets.cmake.
extern "C" const internal::DeviceMemory* const baton_provider_gpudirect;
const internal::DeviceMemory* const baton_provider_gpudirect = make();

CudaMemory::~CudaMemory() {
  for (auto& [ordinal, opened] : devices_) {
    if (opened.opener.joinable()) opened.opener.join();
  }
}

absl::StatusOr<const Driver*> CudaMemory::loaded() const {
  if (const Driver* const driver = find_(); driver != nullptr) return driver;
  return machine_driver();
}

absl::StatusOr<int> CudaMemory::count() const {
  const absl::StatusOr<const Driver*> driver = loaded();
  if (!driver.ok()) return driver.status();
  int count = 0;
  const Result result = (*driver)->cuDeviceGetCount(&count);
  if (absl::Status status = driver_status(**driver, result, "cuDeviceGetCount"); !status.ok()) {
    return status;
  }
  if (count > 0) return count;
  return absl::UnavailableError(
      "this process can use no CUDA device (check CUDA_VISIBLE_DEVICES and nvidia-smi)");
}

absl::StatusOr<MemoryPlace> CudaMemory::place(const void* data, size_t size) const {
  const Driver* const driver = find_();
  if (driver == nullptr || size == 0) return MemoryPlace{};
  absl::StatusOr<PointerFacts> facts = query_pointer(*driver, address(data));
  if (!facts.ok()) {
    // A lost device answers no queries: treat memory that the CPU can read as the host's.
    const bool hosts =
        absl::IsAborted(facts.status()) && internal::check_mapped(data, size, Access::kLocal).ok();
    if (hosts) return MemoryPlace{};
    return facts.status();
  }
  if (!facts->device && !facts->managed) return MemoryPlace{};
  // From here on it is a device's, or an error.
  absl::StatusOr<std::vector<DeviceSpan>> parts = adopt(*driver, {address(data), size});
  if (!parts.ok()) {
    return absl::Status(parts.status().code(),
                        absl::StrCat("registering ", parts.status().message()));
  }
  if (parts->size() > 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "registering %u bytes at %p: they lie in %u allocations of CUDA device %d, the first ends "
        "after %u bytes; register each by itself",
        size, data, parts->size(), facts->ordinal, parts->front().size));
  }
  // Without the device no caller copies anything there either, and says why.
  if (const auto device = device_of(*driver, facts->ordinal); device.ok()) {
    absl::Status reached = reached_by_kernels(**device, address(data));
    if (!reached.ok()) {
      return absl::Status(reached.code(), absl::StrCat("registering ", reached.message()));
    }
  }
  return MemoryPlace{MemoryKind::kDevice, facts->ordinal};
}

absl::StatusOr<const Device*> CudaMemory::owner_of(const void* data, const char* lacking,
                                                   PointerFacts* out) const {
  const Driver* const driver = find_();
  if (driver == nullptr) {
    return absl::UnavailableError(absl::StrCat(lacking, "there is no CUDA driver"));
  }
  const absl::StatusOr<PointerFacts> facts = query_pointer(*driver, address(data));
  if (!facts.ok()) return facts.status();
  if (out != nullptr) *out = *facts;
  return device_of(*driver, facts->ordinal);
}

absl::StatusOr<BackingFile> CudaMemory::dma_buf(const void* data, size_t size) const {
  const absl::StatusOr<const Device*> device = owner_of(data, "no dma-buf: ");
  if (!device.ok()) return device.status();
  const Driver& driver = (*device)->driver();
  if (absl::Status status = reachable_by_adapters(driver, (*device)->facts()); !status.ok()) {
    return status;
  }
  const auto page = static_cast<DevicePointer>(sysconf(_SC_PAGESIZE));
  const DevicePointer begin = address(data) / page * page;
  const DevicePointer end = (address(data) + size + page - 1) / page * page;
  int fd = -1;
  const Device::Current current(**device);
  if (!current.status().ok()) return current.status();
  const absl::Status status =
      (*device)->check(driver.cuMemGetHandleForAddressRange(&fd, begin, end - begin, kDmaBufFd, 0),
                       absl::StrFormat("no dma-buf: exporting %u bytes of CUDA device %d", size,
                                       (*device)->ordinal()));
  if (!status.ok()) return status;
  return BackingFile{fd, static_cast<size_t>(address(data) - begin), true};
}

absl::Status CudaMemory::by_address(const void* data, bool now) const {
  const absl::StatusOr<const Device*> device = owner_of(data, "no nvidia-peermem: ");
  if (!device.ok()) return device.status();
  const Driver& driver = (*device)->driver();
  absl::Status status =
      reachable_by_address(driver, (*device)->facts(), peermem_loaded(options_.root));
  if (!status.ok() || !now) return status;
  // With this attribute, adapters see what kernels or plain copies wrote before.
  const unsigned on = 1;
  const Device::Current current(**device);
  if (!current.status().ok()) return current.status();
  return (*device)->check(driver.cuPointerSetAttribute(&on, kPointerSyncMemops, address(data)),
                          absl::StrCat("no nvidia-peermem: making copies on CUDA device ",
                                       (*device)->ordinal(), " end before adapters read"));
}

absl::Status CudaMemory::look(const void* data, absl::Span<std::byte> to) const {
  const absl::StatusOr<const Device*> device = owner_of(data, "");
  if (!device.ok()) return device.status();
  const auto ring = PinnedRing::create(**device, (to.size() + 4095) / 4096 * 4096);
  if (!ring.ok()) return ring.status();
  absl::Status result;
  const internal::CopyRun run{static_cast<std::byte*>(const_cast<void*>(data)),
                              (*ring)->memory().data(), to.size()};
  (*ring)->copy(internal::CopyDirection::kToHost, 1, false, {&run, 1});
  while ((*ring)->busy()) {
    (*ring)->progress([&](uint64_t, absl::Status status) { result = std::move(status); });
  }
  if (result.ok()) std::copy_n((*ring)->memory().data(), to.size(), to.data());
  return result;
}

std::string CudaMemory::pci_address(int device) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return "";
  const absl::StatusOr<const Device*> opened = device_of(*driver, device);
  return opened.ok() ? (*opened)->facts().pci : "";
}

absl::StatusOr<bool> CudaMemory::wants_flush(int device) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return false;
  const absl::StatusOr<const Device*> opened = device_of(*driver, device);
  if (!opened.ok()) return opened.status();
  const DeviceFacts& facts = (*opened)->facts();
  if (absl::Status status = can_be_ordered(*driver, facts); !status.ok()) return status;
  return flush_policy(facts) == FlushPolicy::kCall;
}

absl::Status CudaMemory::flush(int device) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::OkStatus();
  const absl::StatusOr<const Device*> opened = device_of(*driver, device);
  if (!opened.ok()) return absl::OkStatus();
  const Device::Current current(**opened);
  absl::Status status = current.status();
  if (status.ok()) {
    status =
        (*opened)->check(driver->cuFlushGPUDirectRDMAWrites(kFlushCurrentContext, kOrderedForOwner),
                         absl::StrCat("flushing what adapters wrote to CUDA device ", device));
  }
  return (*opened)->alive().ok() ? status : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<internal::StagingRing>> CudaMemory::staging_ring(
    int device, size_t bytes, bool kernels) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::UnavailableError("no CUDA driver in this process");
  const absl::StatusOr<const Device*> opened = device_of(*driver, device);
  if (!opened.ok()) return opened.status();
  CopyMeans means = means_of(**opened);
  if (!kernels) means.launcher = nullptr;
  return PinnedRing::create(**opened, bytes, means);
}

// The cost of copies is measured once per device. Without measurements each piece is a copy of its
// own.
CopyMeans CudaMemory::means_of(const Device& device) const {
  const std::lock_guard lock(mutex_);
  Opened& opened = devices_[device.ordinal()];
  if (!opened.table.has_value()) {
    auto copier = Copier::open(device, opened.launcher.get(), device.stream(Direction::kToHost));
    absl::Status status = copier.status();
    if (status.ok()) status = (*copier)->measure();
    if (!status.ok()) {
      base::log_event(base::LogLevel::kWarning,
                      "CUDA device %d: the cost of copies could not be measured: %s",
                      device.ordinal(), status.message());
    }
    opened.table = status.ok() ? (*copier)->table() : CopyTable{};
  }
  return {opened.launcher.get(), *opened.table};
}

absl::StatusOr<DeviceExport> CudaMemory::share(const void* data, size_t size) const {
  PointerFacts facts;
  const absl::StatusOr<const Device*> device = owner_of(data, "no CUDA IPC: ", &facts);
  if (!device.ok()) return device.status();
  if (facts.has_handle) return export_handle(**device, address(data), size, facts);
  return export_allocation(**device, address(data), facts);
}

absl::Status CudaMemory::may_map(const DeviceExport& memory) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::OkStatus();
  const absl::StatusOr<int> ordinal = device_with(*driver, memory.device_uuid);
  if (!ordinal.ok()) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  Opened& opened = devices_[*ordinal];
  if (opened.device != nullptr || opened.behind) return absl::OkStatus();
  if (!opened.opener.joinable()) {
    try {
      opened.opener =
          std::thread([this, driver, number = *ordinal] { open_behind(*driver, number); });
    } catch (const std::system_error&) {
      return absl::OkStatus();  // no thread: map() opens it
    }
  }
  return absl::UnavailableError(
      absl::StrFormat("CUDA device %d is being opened for the peer's memory: ask again", *ordinal));
}

// Errors are ignored here: map() opens the device again and reports the reason.
void CudaMemory::open_behind(const Driver& driver, int ordinal) const {
  auto device = Device::open(driver, ordinal);
  const std::lock_guard lock(mutex_);
  Opened& opened = devices_[ordinal];
  opened.behind = true;
  // Another thread may have come first.
  if (device.ok() && opened.device == nullptr) take(opened, *std::move(device));
}

absl::StatusOr<std::unique_ptr<internal::PeerMapping>> CudaMemory::map(
    const DeviceExport& memory) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::UnavailableError("no CUDA IPC: there is no CUDA driver");
  const absl::StatusOr<int> ordinal = device_with(*driver, memory.device_uuid);
  if (!ordinal.ok()) return ordinal.status();
  const absl::StatusOr<const Device*> device = device_of(*driver, *ordinal, Kernels::kNotNeeded);
  if (!device.ok()) return device.status();
  if (memory.by_handle && memory.same_process) return own_allocation(**device, memory);
  if (memory.by_handle) return handles_.map(**device, memory);
  return ImportedAllocation::map(**device, memory);
}

absl::StatusOr<std::unique_ptr<internal::DeviceCopies>> CudaMemory::copies(int device,
                                                                           bool kernels) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::UnavailableError("no CUDA IPC: there is no CUDA driver");
  const absl::StatusOr<const Device*> opened = device_of(*driver, device);
  if (!opened.ok()) return opened.status();
  CopyMeans means = means_of(**opened);
  if (!kernels) means.launcher = nullptr;
  return StreamCopies::create(**opened, means);
}

void CudaMemory::wait_for_copies() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [ordinal, opened] : devices_) {
    if (opened.device != nullptr) wait_for_stream(*opened.device, Direction::kBetween);
  }
}

absl::StatusOr<std::unique_ptr<internal::TransferGates>> CudaMemory::gates(int device,
                                                                           size_t count) const {
  const absl::StatusOr<const Driver*> driver = loaded();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<const Device*> opened = device_of(**driver, device);
  if (!opened.ok()) return opened.status();
  return StreamGates::open(**opened, count);
}

absl::StatusOr<const Launcher*> CudaMemory::kernels_of(int device) const {
  const Driver* const driver = find_();
  if (driver == nullptr) return absl::UnimplementedError("no CUDA driver in this process");
  const absl::StatusOr<const Device*> found = device_of(*driver, device);
  if (!found.ok()) return found.status();
  const std::lock_guard lock(mutex_);
  const Opened& opened = devices_[device];
  if (opened.launcher == nullptr) return *opened.no_kernels;
  return opened.launcher.get();
}

absl::StatusOr<std::unique_ptr<internal::VectorSums>> CudaMemory::sums(int device) const {
  const absl::StatusOr<const Launcher*> kernels = kernels_of(device);
  if (!kernels.ok()) return kernels.status();
  const Device& there = (*kernels)->device();
  const CopyMeans means = means_of(there);
  const std::lock_guard lock(mutex_);
  std::optional<SumCosts>& sums = devices_[device].sums;
  if (!sums.has_value()) {
    const auto costs = measure_sums(there, **kernels);
    if (!costs.ok()) {
      return absl::Status(costs.status().code(), absl::StrCat("the cost of sums was not measured: ",
                                                              costs.status().message()));
    }
    sums = *costs;
  }
  return KernelSums::create(there, **kernels, means.table, *sums);
}

absl::StatusOr<std::unique_ptr<internal::DeviceBuffer>> CudaMemory::allocate(int device,
                                                                             size_t bytes) const {
  const absl::StatusOr<const Driver*> driver = loaded();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<const Device*> opened = device_of(**driver, device);
  if (!opened.ok()) return opened.status();
  return SlabBuffer::create(**opened, bytes);
}

void CudaMemory::take(Opened& opened, std::unique_ptr<Device> device) const {
  opened.device = std::move(device);
  opened.table = options_.table;
  opened.sums = options_.sums;
}

absl::StatusOr<const Device*> CudaMemory::device_of(const Driver& driver, int ordinal,
                                                    Kernels kernels) const {
  const std::lock_guard lock(mutex_);
  Opened& opened = devices_[ordinal];
  if (opened.device == nullptr) {
    absl::StatusOr<std::unique_ptr<Device>> device = Device::open(driver, ordinal);
    if (!device.ok()) return device.status();
    take(opened, *std::move(device));
  }
  if (kernels == Kernels::kLoaded && !opened.no_kernels.has_value()) {
    auto launcher = Launcher::load(*opened.device, options_.kernels);
    opened.no_kernels = launcher.status();
    if (launcher.ok()) opened.launcher = *std::move(launcher);
  }
  if (absl::Status status = opened.device->alive(); !status.ok()) return status;
  return opened.device.get();
}

namespace {

constexpr size_t kPiece = 8 << 20;
constexpr size_t kPage = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<SlabBuffer>> SlabBuffer::create(const Device& device, size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("a buffer of 0 bytes on a device");
  auto slab = DeviceSlab::create(device, bytes);
  if (!slab.ok()) return slab.status();
  auto ring = PinnedRing::create(device, std::min(kPiece, (bytes + kPage - 1) / kPage * kPage));
  if (!ring.ok()) return ring.status();
  return std::unique_ptr<SlabBuffer>(new SlabBuffer(*std::move(slab), *std::move(ring)));
}

std::byte* SlabBuffer::data() const {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(slab_->span().data));
}

absl::Status SlabBuffer::check(size_t offset, size_t bytes) const {
  if (offset <= size() && bytes <= size() - offset) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrFormat("%u bytes from %u on: a buffer on a device has %u", bytes, offset, size()));
}

absl::Status SlabBuffer::copy(internal::CopyDirection direction, size_t offset, size_t bytes) {
  const internal::CopyRun run{data() + offset, ring_->memory().data(), bytes};
  ring_->copy(direction, 1, false, {&run, 1});
  absl::Status result;
  while (ring_->busy()) {
    ring_->progress([&](uint64_t, absl::Status status) { result = std::move(status); });
  }
  return result;
}

absl::Status SlabBuffer::put(size_t offset, absl::Span<const std::byte> bytes) {
  if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
  const size_t most = ring_->memory().size();
  for (size_t at = 0; at < bytes.size(); at += most) {
    const size_t piece = std::min(most, bytes.size() - at);
    std::memcpy(ring_->memory().data(), bytes.data() + at, piece);
    if (absl::Status status = copy(internal::CopyDirection::kToDevice, offset + at, piece);
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status SlabBuffer::get(size_t offset, absl::Span<std::byte> bytes) {
  if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
  const size_t most = ring_->memory().size();
  for (size_t at = 0; at < bytes.size(); at += most) {
    const size_t piece = std::min(most, bytes.size() - at);
    if (absl::Status status = copy(internal::CopyDirection::kToHost, offset + at, piece);
        !status.ok()) {
      return status;
    }
    std::memcpy(bytes.data() + at, ring_->memory().data(), piece);
  }
  return absl::OkStatus();
}

}  // namespace baton::gpudirect
