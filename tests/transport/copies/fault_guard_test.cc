// Copies of memory that is gone end by themselves, and every other fault is whose it was.
#include "transport/base/copies/fault_guard.h"

#include <dlfcn.h>
#include <pthread.h>

#include "tests/test.h"
#include "tests/transport/fading_memory.h"

namespace baton {
namespace {

constexpr size_t kBytes = 64 << 10;

class FaultGuard : public testing::TestWithParam<Fading> {
 protected:
  const FadingMemory memory_{kBytes, GetParam()};
  std::vector<std::byte> other_ = std::vector<std::byte>(kBytes);
};

TEST_P(FaultGuard, ACopyEndsWhereMemoryIsGone) {
  const auto write = [&](std::byte* to, size_t bytes) {
    return base::guarded([&] { std::memcpy(to, other_.data(), bytes); });
  };
  const auto read = [&](const std::byte* from, size_t bytes) {
    return base::guarded([&] { std::memcpy(other_.data(), from, bytes); });
  };
  EXPECT_TRUE(write(memory_.data, kBytes));
  EXPECT_TRUE(base::readable(memory_.half() - 1, 2));
  memory_.fade();
  const bool read_only = GetParam() == Fading::kReadOnly;
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(write(memory_.data, kBytes / 2));
    EXPECT_FALSE(write(memory_.data, kBytes / 2 + 1));
    EXPECT_FALSE(write(memory_.half(), 1));
    EXPECT_TRUE(read(memory_.data, kBytes / 2));
    EXPECT_EQ(read(memory_.half(), 8), read_only);
    EXPECT_EQ(base::readable(memory_.half() - 1, 2), read_only);
    EXPECT_EQ(base::readable(memory_.half(), 2), read_only);
    EXPECT_TRUE(base::readable(memory_.half() - 2, 2));
  }
}

TEST_P(FaultGuard, IsEachThreadsOwn) {
  memory_.fade();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        EXPECT_FALSE(base::guarded([&] { std::memset(memory_.half(), 1, 1); }));
        EXPECT_TRUE(base::guarded([&] { (void)*static_cast<volatile std::byte*>(memory_.data); }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Memory, FaultGuard,
                         testing::Values(Fading::kUnmapped, Fading::kReadOnly, Fading::kTruncated),
                         [](const auto& each) { return name_of(each.param); });

// In processes of their own: each begins without a handler of ours.
class FaultGuardDeathTest : public testing::Test {
 protected:
  FaultGuardDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  static constexpr int kAutoDisarm = static_cast<int>(1U << 31);  // SS_AUTODISARM of the kernel
  static void copy_once() {
    int from = 1, to = 0;
    if (!base::guarded([&] { to = from; }) || to != 1) _exit(9);
  }
  static void fault() { *static_cast<volatile int*>(mmap_nothing()) = 1; }
  static void* mmap_nothing() {
    return mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
};

TEST_F(FaultGuardDeathTest, OtherFaultsEndTheProcessAsEver) {
  const auto others = [] {
    signal(SIGSEGV, SIG_DFL);  // a sanitizer's
    copy_once();
    fault();
  };
  EXPECT_EXIT(others(), testing::KilledBySignal(SIGSEGV), "");
  const auto sent = [] {
    signal(SIGBUS, SIG_DFL);
    copy_once();
    raise(SIGBUS);
  };
  EXPECT_EXIT(sent(), testing::KilledBySignal(SIGBUS), "");
}

// Promise(memory): The fault handler passes every other fault to the handler before it | called as
//   the kernel would have called it
TEST_F(FaultGuardDeathTest, OtherFaultsGoToThePreviousHandler) {
  const auto plain = [] {
    signal(SIGSEGV, [](int number) { _exit(number == SIGSEGV ? 3 : 4); });
    copy_once();
    fault();
  };
  EXPECT_EXIT(plain(), testing::ExitedWithCode(3), "");
  const auto with_information = [] {
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void* context) {
      _exit(info->si_code == SEGV_ACCERR && context != nullptr ? 5 : 6);
    };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    copy_once();
    fault();
  };
  EXPECT_EXIT(with_information(), testing::ExitedWithCode(5), "");
}

// What the kernel does for a handler: signals are held back while it runs, its own too.
TEST_F(FaultGuardDeathTest, WhatAHandlerAskedForIsKept) {
  static volatile int calls = 0;
  const auto install = [](int flags) {
    struct sigaction action {};
    action.sa_handler = [](int) {
      sigset_t held;
      pthread_sigmask(SIG_BLOCK, nullptr, &held);
      if (!sigismember(&held, SIGUSR1)) _exit(20);
      calls = calls + 1;
      if (calls == 2) _exit(sigismember(&held, SIGSEGV) ? 21 : 22);
      fault();
    };
    action.sa_flags = flags;
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGSEGV, &action, nullptr);
    copy_once();
    fault();
  };
  EXPECT_EXIT(install(0), testing::KilledBySignal(SIGSEGV), "") << "a fault in it is the end";
  EXPECT_EXIT(install(SA_NODEFER), testing::ExitedWithCode(22), "");
}

TEST_F(FaultGuardDeathTest, AHandlerForOneFaultHasOneAlone) {
  static void* nothing = nullptr;
  const auto once = [] {
    nothing = mmap_nothing();
    struct sigaction action {};
    action.sa_handler = [](int) { mprotect(nothing, 4096, PROT_READ | PROT_WRITE); };
    action.sa_flags = SA_RESETHAND;
    sigaction(SIGSEGV, &action, nullptr);
    copy_once();
    *static_cast<volatile int*>(nothing) = 1;
    if (base::guarded([] { fault(); })) _exit(23);  // copies are guarded all the same
    mprotect(nothing, 4096, PROT_NONE);
    *static_cast<volatile int*>(nothing) = 1;
    _exit(24);
  };
  EXPECT_EXIT(once(), testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(FaultGuardDeathTest, AThreadThatBlocksAllSignalsIsGuardedToo) {
  const auto blocked = [](bool before) {
    if (before) copy_once();
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::thread([] {
      if (base::guarded([] { fault(); })) _exit(25);
      sigset_t held;
      pthread_sigmask(SIG_BLOCK, nullptr, &held);
      _exit(sigismember(&held, SIGUSR1) ? 26 : 27);
    }).join();
  };
  EXPECT_EXIT(blocked(false), testing::ExitedWithCode(26), "");
  EXPECT_EXIT(blocked(true), testing::ExitedWithCode(26), "");
}

// The kernel takes it away when it calls a handler, and gives it back when that returns; ours does
// not.
TEST_F(FaultGuardDeathTest, AnAlternateStackThatIsDisarmedComesBack) {
  const auto faults = [] {
    std::vector<char> room(1 << 16);
    stack_t stack{.ss_sp = room.data(), .ss_flags = kAutoDisarm, .ss_size = room.size()};
    if (sigaltstack(&stack, nullptr) != 0) _exit(30);
    if (base::guarded([] { fault(); })) _exit(31);
    stack_t now{};
    sigaltstack(nullptr, &now);
    _exit(now.ss_sp == room.data() && now.ss_flags == kAutoDisarm ? 32 : 33);
  };
  EXPECT_EXIT(faults(), testing::ExitedWithCode(32), "");
}

TEST_F(FaultGuardDeathTest, TheLibraryMayBeUnloaded) {
  const auto unloaded = [] {
    signal(SIGSEGV, [](int) { _exit(28); });
    void* library = dlopen(BATON_FAULT_GUARD_MODULE, RTLD_NOW | RTLD_LOCAL);
    const auto copy = reinterpret_cast<bool (*)()>(dlsym(library, "copy_under_guard"));
    if (copy == nullptr || !copy() || dlclose(library) != 0) _exit(29);
    fault();
  };
  EXPECT_EXIT(unloaded(), testing::ExitedWithCode(28), "");
}

// Sent by somebody while a copy is under way: it is not the copy's.
TEST_F(FaultGuardDeathTest, ASignalThatWasSentIsNoFault) {
  const auto during = [] {
    signal(SIGSEGV, [](int) { _exit(7); });
    if (base::guarded([] { raise(SIGSEGV); })) _exit(8);
  };
  EXPECT_EXIT(during(), testing::ExitedWithCode(7), "");
}

TEST_F(FaultGuardDeathTest, CanBeRefused) {
  const auto refused = [] {
    signal(SIGSEGV, SIG_DFL);
    setenv("BATON_CATCH_FAULTS", "no", 1);
    copy_once();
    struct sigaction now;
    sigaction(SIGSEGV, nullptr, &now);
    if (now.sa_handler != SIG_DFL) _exit(10);
    (void)base::guarded([] { fault(); });
  };
  EXPECT_EXIT(refused(), testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace baton
