// The fake's memory: protection domains and regions.
#include "tests/std.h"
#include "tests/verbs/fake/fake_objects.h"

namespace baton {

// What a descriptor stands for, for who reaches the bytes by it.
ibv_mr* FakeVerbs::map(ibv_mr* made, int fd, uint64_t offset, FakeOptions::Worth worth) {
  struct stat file {};
  fstat(fd, &file);
  auto& region = fake_of<FakeMr>(made);
  region.mapped_bytes = static_cast<size_t>(file.st_size);
  region.mapped = static_cast<std::byte*>(
      mmap(nullptr, region.mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  region.offset = offset;
  region.worth = worth;
  return made;
}

struct FakeMemoryCalls : FakeCall {
  static ibv_pd* alloc_pd(ibv_context* context) {
    const Locked fake(context);
    auto* made = new FakePd;
    made->pd.context = context;
    ++fake_of_context(context).users;
    ++fake->objects_;
    return &made->pd;
  }
  static int dealloc_pd(ibv_pd* pd) {
    const Locked fake(pd->context);
    auto& domain = fake_of<FakePd>(pd);
    if (domain.users != 0) fake->violation("a protection domain freed while its objects exist");
    --fake_of_context(pd->context).users;
    --fake->objects_;
    delete &domain;
    return 0;
  }
  static ibv_mr* reg_mr_iova2(ibv_pd* pd, void* data, size_t bytes, uint64_t, unsigned access) {
    const Locked fake(pd->context);
    FakeContext& context = fake_of_context(pd->context);
    if (!fake->fork_safe_) fake->violation("memory registered before ibv_fork_init()");
    if (context.regions >= fake->options_.max_regions ||
        bytes > fake->options_.pinnable_bytes -
                    std::min(fake->options_.pinnable_bytes, context.pinned)) {
      return failed(ENOMEM);
    }
    context.pinned += bytes;
    ++context.regions;
    auto* made = new FakeMr;
    made->access = access;
    made->mr.context = pd->context;
    made->mr.pd = pd;
    made->mr.addr = data;
    made->mr.length = bytes;
    made->mr.lkey = made->mr.rkey = static_cast<uint32_t>(fake->regions_.size());
    fake->regions_.push_back(made);
    ++fake_of<FakePd>(pd).users;
    ++fake->objects_;
    return &made->mr;
  }
  // Of the host's memory, or of what nvidia-peermem finds there.
  static ibv_mr* reg_memory(ibv_pd* pd, void* data, size_t bytes, uint64_t, unsigned access) {
    FakeVerbs& fake = of(pd->context);
    uint64_t offset = 0;
    const int fd = fake.options_.peer_memory ? fake.options_.peer_memory(data, bytes, &offset) : -1;
    ibv_mr* const made = reg_mr_iova2(pd, data, bytes, 0, access);
    if (fd >= 0 && made != nullptr) {
      ++fake.stats_.by_address;
      fake.map(made, fd, offset, fake.options_.address_worth);
    }
    if (fd >= 0) close(fd);
    return made;
  }
  static ibv_mr* reg_mr(ibv_pd* pd, void* data, size_t bytes, int access) {
    return reg_memory(pd, data, bytes, 0, static_cast<unsigned>(access));
  }
  static ibv_mr* reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t address, int fd,
                               int access) {
    FakeVerbs& fake = of(pd->context);
    struct stat file {};
    if (!fake.options_.dma_buf) return failed(EOPNOTSUPP);
    if (fstat(fd, &file) != 0) return nullptr;  // EBADF
    offset +=
        static_cast<uint64_t>(lseek(fd, 0, SEEK_CUR));  // where the dma-buf begins in its file
    if (offset + bytes > static_cast<uint64_t>(file.st_size)) return failed(EINVAL);
    if (bytes > fake.options_.window_bytes) return failed(ENOMEM);
    {
      Lock lock(fake.mutex_);
      ++fake.stats_.dma_bufs;
    }
    ibv_mr* const made = reg_mr_iova2(pd, reinterpret_cast<void*>(address), bytes, address,
                                      static_cast<unsigned>(access));
    if (made == nullptr) return nullptr;
    return fake.map(made, fd, offset, fake.options_.dma_buf_worth);
  }
  static int dereg_mr(ibv_mr* mr) {
    const Locked fake(mr->context);
    fake->land();
    fake->regions_[mr->lkey] = nullptr;
    fake_of_context(mr->context).pinned -= mr->length;
    --fake_of_context(mr->context).regions;
    --fake_of<FakePd>(mr->pd).users;
    --fake->objects_;
    const FakeMr& region = fake_of<FakeMr>(mr);
    if (region.mapped != nullptr) munmap(region.mapped, region.mapped_bytes);
    delete &region;
    return 0;
  }
};

void add_memory_calls(verbs::VerbsApi& api) {
  using Calls = FakeMemoryCalls;
  api.ibv_alloc_pd = Calls::alloc_pd;
  api.ibv_dealloc_pd = Calls::dealloc_pd;
  api.ibv_reg_mr = Calls::reg_mr;
  api.ibv_reg_mr_iova2 = Calls::reg_memory;
  api.ibv_dereg_mr = Calls::dereg_mr;
  api.ibv_reg_dmabuf_mr = Calls::reg_dmabuf_mr;
}

}  // namespace baton
