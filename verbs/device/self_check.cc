// Reads and writes memory of devices through an adapter's loopback, and compares.
#include "verbs/device/device.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/unique_fd.h"
#include "transport/clock.h"
#include "transport/internal/device_memory.h"
#include "verbs/device/gid.h"

namespace baton::verbs {
namespace {

constexpr size_t kBytes = 4096;  // that are written
constexpr size_t kLook = 64;     // that are read at each end of a region
constexpr int kLooks = 3;        // at memory that another process changes meanwhile
constexpr Time kPatience = std::chrono::seconds(1);

// A queue pair that is its own peer, and a page of the host.
class Loopback {
 public:
  explicit Loopback(Port& port) : port_(port), api_(port.device->api()) {}
  ~Loopback() {
    if (queue_pair_ != nullptr) api_.ibv_destroy_qp(queue_pair_);
    if (completions_ != nullptr) api_.ibv_destroy_cq(completions_);
    if (page_mr_ != nullptr) api_.ibv_dereg_mr(page_mr_);
  }
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  absl::Status open(const Tuning& tuning) {
    const Device& device = *port_.device;
    auto registered = device.register_memory(
        page_->data(), page_->size(),
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    if (!registered.ok()) return registered.status();
    page_mr_ = *registered;
    completions_ = api_.ibv_create_cq(device.context(), 4, nullptr, nullptr, 0);
    if (completions_ == nullptr) return failed("no completion queue", errno);
    ibv_qp_init_attr wish{};
    wish.send_cq = wish.recv_cq = completions_;
    wish.qp_type = IBV_QPT_RC;
    wish.cap.max_send_wr = wish.cap.max_recv_wr = 2;
    wish.cap.max_send_sge = wish.cap.max_recv_sge = 1;
    queue_pair_ = api_.ibv_create_qp(device.pd(), &wish);
    if (queue_pair_ == nullptr) return failed("no queue pair", errno);
    return connect(tuning);
  }

  // The adapter's own access to [data, data + bytes): what it reads there goes to the page, and
  // with `write` what is in the page goes there.
  absl::Status move(const ibv_mr& memory, std::byte* data, size_t bytes, bool write) {
    ibv_sge piece{reinterpret_cast<uintptr_t>(data), static_cast<uint32_t>(bytes), memory.lkey};
    ibv_send_wr request{};
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = write ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = reinterpret_cast<uintptr_t>(page_->data());
    request.wr.rdma.rkey = page_mr_->rkey;
    ibv_send_wr* wrong = nullptr;
    if (const int error = ibv_post_send(queue_pair_, &request, &wrong)) {
      return failed("nothing can be posted", error);
    }
    const Time until = Clock::steady().now() + kPatience;
    ibv_wc completion{};
    while (true) {
      const int count = ibv_poll_cq(completions_, 1, &completion);
      if (count > 0) break;
      if (count < 0 || Clock::steady().now() > until) {
        return absl::DeadlineExceededError("the adapter does not answer");
      }
    }
    if (completion.status == IBV_WC_SUCCESS) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrFormat("completion status %d", static_cast<int>(completion.status)));
  }

  absl::Span<std::byte> page() { return absl::MakeSpan(*page_); }

 private:
  static absl::Status failed(const char* what, int error) {
    return absl::UnavailableError(absl::StrFormat("%s (%s)", what, strerror(error)));
  }

  absl::Status connect(const Tuning& tuning) {
    ibv_qp_attr init{};
    init.qp_state = IBV_QPS_INIT;
    init.port_num = port_.number;
    init.qp_access_flags =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    if (const int error = api_.ibv_modify_qp(
            queue_pair_, &init,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
      return failed("the queue pair cannot be brought to INIT", error);
    }
    ibv_qp_attr ready{};
    ready.qp_state = IBV_QPS_RTR;
    ready.path_mtu = std::min<ibv_mtu>(port_.attributes.active_mtu, IBV_MTU_1024);
    ready.dest_qp_num = queue_pair_->qp_num;
    ready.max_dest_rd_atomic = 1;
    ready.min_rnr_timer = 12;
    ready.ah_attr.port_num = port_.number;
    ready.ah_attr.dlid = port_.attributes.lid;
    if (!port_.infiniband()) {
      const auto gid = choose_gid(port_.gids, tuning.gid_index, 0xff);
      if (!gid.ok()) return gid.status();
      ready.ah_attr.is_global = 1;
      ready.ah_attr.grh.dgid = gid->gid;
      ready.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid->index);
      ready.ah_attr.grh.hop_limit = 64;
    }
    if (const int error = api_.ibv_modify_qp(
            queue_pair_, &ready,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
      return failed("the queue pair cannot be connected to itself", error);
    }
    ibv_qp_attr send{};
    send.qp_state = IBV_QPS_RTS;
    send.timeout = tuning.timeout;
    send.retry_cnt = std::min<uint8_t>(tuning.retry_count, 6);
    send.max_rd_atomic = 1;
    if (const int error =
            api_.ibv_modify_qp(queue_pair_, &send,
                               IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                   IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)) {
      return failed("the queue pair cannot be brought to RTS", error);
    }
    return absl::OkStatus();
  }

  using Page = std::array<std::byte, kBytes>;

  Port& port_;
  const VerbsApi& api_;
  const std::unique_ptr<Page> page_ = std::make_unique<Page>();
  ibv_mr* page_mr_ = nullptr;
  ibv_cq* completions_ = nullptr;
  ibv_qp* queue_pair_ = nullptr;
};

// Compares what the adapter reads at `at` with what the device holds there.
absl::Status read_check(Loopback& loop, const ibv_mr& memory, std::byte* at, size_t bytes,
                        const internal::DeviceMemory& devices) {
  std::array<std::byte, kLook> before;
  std::array<std::byte, kLook> after;
  for (int look = 0; look < kLooks; ++look) {
    absl::Status status = devices.look(at, {before.data(), bytes});
    std::fill_n(loop.page().data(), bytes, ~before[0]);
    if (status.ok()) status = loop.move(memory, at, bytes, /*write=*/false);
    if (status.ok()) status = devices.look(at, {after.data(), bytes});
    if (!status.ok()) return status;
    if (std::equal(loop.page().data(), loop.page().data() + bytes, before.data())) {
      return absl::OkStatus();
    }
    // The program that uses the memory may have changed it just now.
    if (std::equal(before.data(), before.data() + bytes, after.data())) {
      return absl::DataLossError("a read returned wrong bytes");
    }
  }
  return absl::OkStatus();
}

// Checks what the adapter writes to our own memory on the device. If the device gives none, the
// check is left out.
absl::Status write_check(Loopback& loop, const Device& device, int cuda, Device::Way way,
                         const internal::DeviceMemory& devices) {
  const auto buffer = devices.allocate(cuda, kBytes);
  if (!buffer.ok()) return absl::OkStatus();
  std::byte* const data = (*buffer)->data();
  BackingFile file;
  base::UniqueFd made;
  if (way == Device::Way::kDmaBuf) {
    const auto exported = devices.dma_buf(data, kBytes);
    if (!exported.ok()) return absl::OkStatus();
    file = *exported;
    made.reset(file.fd);
  } else if (!devices.by_address(data, /*now=*/true).ok()) {
    return absl::OkStatus();
  }
  const auto memory = device.register_memory(data, kBytes, IBV_ACCESS_LOCAL_WRITE, file);
  if (!memory.ok()) return absl::OkStatus();
  for (size_t i = 0; i < kBytes; ++i) loop.page()[i] = static_cast<std::byte>(i * 131 + i / 251);
  std::array<std::byte, kBytes> seen{};
  absl::Status status = (*buffer)->put(0, seen);
  if (status.ok()) status = loop.move(**memory, data, kBytes, /*write=*/true);
  if (status.ok() && devices.wants_flush(cuda).value_or(false)) status = devices.flush(cuda);
  if (status.ok()) status = (*buffer)->get(0, absl::MakeSpan(seen));
  if (status.ok() && !std::equal(seen.begin(), seen.end(), loop.page().data())) {
    status = absl::DataLossError("a write did not arrive");
  }
  device.api().ibv_dereg_mr(*memory);
  return status;
}

}  // namespace

absl::Status prove_region(Port& port, const Tuning& tuning, const RegionEntry& region,
                          Device::Way way) {
  const internal::DeviceMemory* const devices = internal::device_memory();
  const int cuda = region.place.device;
  if (devices == nullptr || cuda < 0) return absl::OkStatus();  // no code here can look at it
  Device& device = *port.device;
  const ibv_mr* const memory = device.region(region.index);
  Loopback loop(port);
  absl::Status status = loop.open(tuning);
  const size_t bytes = std::min(kLook, region.size);
  for (std::byte* const at : {region.base, region.base + (region.size - bytes)}) {
    if (status.ok()) status = read_check(loop, *memory, at, bytes, *devices);
  }
  if (status.ok() && !device.proved(cuda, way)) {
    status = write_check(loop, device, cuda, way, *devices);
    if (status.ok()) device.set_proved(cuda, way);
  }
  if (status.ok()) return status;
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s registers memory of CUDA device %d by %s, but cannot transfer it: %s", device.name(),
      cuda, way == Device::Way::kDmaBuf ? "dma-buf" : "nvidia-peermem", status.message()));
}

}  // namespace baton::verbs
