// The scheduler: runs the threads of one block at a time, as fibres, and checks how they meet.
#include "cuda_emulator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "fibre.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#endif

namespace dlmkern::emulator {
namespace {

constexpr std::size_t kMaxThreads = 1024;
constexpr std::size_t kMaxStaticShared = 48 * 1024;
constexpr std::size_t kMaxSharedByDefault = 48 * 1024;  // static and dynamic together
constexpr std::size_t kMaxShared = 227 * 1024;
constexpr std::size_t kRedZone = 64;
constexpr unsigned char kPoison = 0xff;  // a NaN in every float format

#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t kStackSize = 256 * 1024;
#else
constexpr std::size_t kStackSize = 64 * 1024;
#endif

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class Index>
std::string describe_index(const Index& i) {
  return join("(", i.x, ",", i.y, ",", i.z, ")");
}

std::size_t volume(const dim3& size) { return std::size_t{size.x} * size.y * size.z; }

uint3 unravel(std::size_t index, const dim3& size) {
  return {static_cast<unsigned>(index % size.x), static_cast<unsigned>(index / size.x % size.y),
          static_cast<unsigned>(index / size.x / size.y)};
}

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

// Turns for `count` blocks or threads, as the settings order them.
class Turns {
 public:
  explicit Turns(std::size_t count) : order_(count) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    if (settings.order == Order::reverse) std::reverse(order_.begin(), order_.end());
  }

  const std::vector<std::size_t>& next_round(Random& random) {
    if (settings.order == Order::random) {
      for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
    }
    return order_;
  }

 private:
  std::vector<std::size_t> order_;
};

// Stacks for the fibres of one block, each above a page that may not be touched.
class Stacks {
 public:
  void* at(std::size_t index) {
    static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    while (stacks_.size() <= index) {
      void* memory =
          mmap(nullptr, page + kStackSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return nullptr;
      void* stack = static_cast<char*>(memory) + page;
      if (mprotect(stack, kStackSize, PROT_READ | PROT_WRITE) != 0) return nullptr;
      stacks_.push_back(stack);
    }
    return stacks_[index];
  }

 private:
  std::vector<void*> stacks_;  // kept for the life of the process
};

// The shared memory of the running block. Arrays are apart by red zones; what is handed out is filled with
// NaN.
class SharedMemory {
 public:
  SharedMemory() : bytes_(kMaxShared + 4096 * kRedZone) {}

  // `limit` bounds static and dynamic memory together.
  void start_block(std::size_t dynamic_bytes, std::size_t limit) {
    limit_ = limit;
    ASAN_POISON_MEMORY_REGION(bytes_.data(), bytes_.size());
    end_ = kRedZone;
    static_bytes_ = 0;
    dynamic_bytes_ = dynamic_bytes;
    dynamic_ = place(dynamic_bytes, 16);
  }

  void* dynamic() const { return dynamic_; }

  // Null when the block has no room left.
  void* place_static(std::size_t size, std::size_t alignment) {
    static_bytes_ += size;
    if (static_bytes_ > kMaxStaticShared || static_bytes_ + dynamic_bytes_ > limit_) return nullptr;
    return place(size, alignment);
  }

 private:
  void* place(std::size_t size, std::size_t alignment) {
    const auto base = reinterpret_cast<std::uintptr_t>(bytes_.data());
    const std::size_t begin = ((base + end_ + alignment - 1) & ~(alignment - 1)) - base;
    if (begin + size + kRedZone > bytes_.size()) return nullptr;
    // Red zones are kept to whole 8-byte granules, which the sanitizer can mark.
    end_ = (begin + size + 2 * kRedZone - 1) & ~(kRedZone - 1);
    void* address = bytes_.data() + begin;
    ASAN_UNPOISON_MEMORY_REGION(address, size);
    std::memset(address, kPoison, size);
    return address;
  }

  std::vector<unsigned char> bytes_;
  std::size_t end_ = 0, static_bytes_ = 0, dynamic_bytes_ = 0, limit_ = 0;
  void* dynamic_ = nullptr;
};

// A call in the source, such as __syncthreads at a line.
struct Call {
  const char* name = nullptr;
  Site site;

  friend bool operator==(const Call& a, const Call& b) {
    return std::strcmp(a.name, b.name) == 0 && a.site.line() == b.site.line() &&
           std::strcmp(a.site.file_name(), b.site.file_name()) == 0;
  }
};

std::string describe_call(const Call& call) {
  return join(call.name, " at ", call.site.file_name(), ":", call.site.line());
}

enum class State { ready, at_barrier, in_collective, exited };

struct Thread {
  Fibre fibre;
  uint3 index{};
  State state = State::ready;
  Call waiting_in;
};

// Lanes that meet in one collective. Free when nobody has arrived and nobody is left to read.
struct Meeting {
  unsigned mask = 0, arrived = 0, unread = 0;
  Call call;
  std::array<std::uint64_t, kWarpSize> values;
};

struct Warp {
  unsigned running = 0;                       // lanes that exist and have not exited
  std::array<Meeting, kWarpSize> meetings{};  // enough: a lane takes part in one at a time
};

struct BarrierState {
  unsigned arrived = 0, true_predicates = 0;
  Call call;
  BarrierVotes last{};
};

// Unwinds the thread that broke a rule; the others are abandoned where they wait, holding nothing.
struct LaunchStopped {};

class Scheduler {
 public:
  cudaError_t run(const LaunchShape& shape, const void* kernel, void (*run_thread)(const void*),
                  const void* context);
  BarrierVotes barrier(const Call& call, bool predicate);
  const std::uint64_t* exchange(const Call& call, unsigned mask, std::uint64_t value);
  void step(const Site& site);
  [[noreturn]] void fail(cudaError_t error, const std::string& reason);
  void* dynamic_shared_memory() const { return shared_.dynamic(); }
  void* place_shared_array(std::size_t size, std::size_t alignment, const Site& site);

  const std::string& message() const { return message_; }
  std::map<const void*, std::size_t> dynamic_shared_limits;

 private:
  cudaError_t check(const LaunchShape& shape, const void* kernel);
  std::size_t dynamic_shared_limit(const void* kernel) const;
  void run_block();
  void run_threads();
  void start_thread(std::size_t index);
  static void thread_main();
  void exit_thread();
  void suspend(State state, const Call& call);
  void record(cudaError_t error, const std::string& reason);
  std::string describe_waiting() const;
  void count_step(const Site& site);
  Warp& current_warp() { return warps_[current_ / kWarpSize]; }

  void (*run_thread_)(const void*) = nullptr;
  const void* context_ = nullptr;
  std::size_t block_threads_ = 0;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::size_t current_ = 0;  // the running thread
  std::size_t alive_ = 0;
  BarrierState barrier_;
  std::uint64_t steps_ = 0;
  Random random_{0};
  Fibre scheduler_fibre_;
  Stacks stacks_;
  SharedMemory shared_;
  cudaError_t error_ = cudaSuccess;
  std::string message_;
};

Scheduler scheduler;
std::mutex launch_mutex;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_message;

// ---- One launch -------------------------------------------------------------------------------------------

cudaError_t Scheduler::check(const LaunchShape& shape, const void* kernel) {
  const auto& [grid, block, shared_bytes] = shape;
  const auto in_range = [](const dim3& size, unsigned x, unsigned y, unsigned z) {
    return size.x >= 1 && size.y >= 1 && size.z >= 1 && size.x <= x && size.y <= y && size.z <= z;
  };
  if (!in_range(grid, 0x7fffffffu, 65535, 65535)) {
    record(cudaErrorInvalidConfiguration,
           join("grid ", describe_index(grid), " is outside (1..2^31-1, 1..65535, 1..65535)"));
  } else if (!in_range(block, 1024, 1024, 64) || volume(block) > kMaxThreads) {
    record(cudaErrorInvalidConfiguration,
           join("block ", describe_index(block), " has not 1..1024 threads (z up to 64)"));
  } else {
    const std::size_t limit = dynamic_shared_limit(kernel);
    if (shared_bytes > limit) {
      record(cudaErrorInvalidValue,
             join(shared_bytes, " bytes of dynamic shared memory, but the kernel may take ", limit,
                  " (cudaFuncSetAttribute raises this to at most 227 KB)"));
    }
  }
  return error_;
}

std::size_t Scheduler::dynamic_shared_limit(const void* kernel) const {
  const auto raised = dynamic_shared_limits.find(kernel);
  return raised == dynamic_shared_limits.end() ? kMaxSharedByDefault : raised->second;
}

cudaError_t Scheduler::run(const LaunchShape& shape, const void* kernel, void (*run_thread)(const void*),
                           const void* context) {
  error_ = cudaSuccess;
  message_.clear();
  if (check(shape, kernel) != cudaSuccess) return error_;

  run_thread_ = run_thread;
  context_ = context;
  steps_ = 0;
  random_ = Random(settings.seed);
  block_threads_ = volume(shape.block);
  threads_.resize(std::max(threads_.size(), block_threads_));
  warps_.resize((block_threads_ + kWarpSize - 1) / kWarpSize);
  coordinates = {{}, {}, shape.block, shape.grid};

  const bool raised = dynamic_shared_limits.count(kernel) > 0;
  const std::size_t shared_limit = raised ? kMaxShared : kMaxSharedByDefault;
  Turns turns(volume(shape.grid));
  for (const std::size_t block : turns.next_round(random_)) {
    coordinates.block = unravel(block, shape.grid);
    shared_.start_block(shape.shared_bytes, shared_limit);
    run_block();
    if (error_ != cudaSuccess) break;
  }
  return error_;
}

void Scheduler::run_block() {
  ++SharedArray::current_block;
  alive_ = block_threads_;
  barrier_ = {};
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    const std::size_t lanes = std::min<std::size_t>(kWarpSize, block_threads_ - w * kWarpSize);
    warps_[w].running = static_cast<unsigned>((std::uint64_t{1} << lanes) - 1);
    for (Meeting& meeting : warps_[w].meetings) meeting.arrived = meeting.unread = 0;
  }
  for (std::size_t i = 0; i < block_threads_; ++i) start_thread(i);
  if (error_ == cudaSuccess) run_threads();
}

void Scheduler::start_thread(std::size_t index) {
  void* stack = stacks_.at(index);
  if (stack == nullptr) return record(cudaErrorMemoryAllocation, "no memory for the emulator's stacks");
  Thread& thread = threads_[index];
  thread.index = unravel(index, coordinates.block_size);
  thread.state = State::ready;
  thread.fibre.prepare(stack, kStackSize, &Scheduler::thread_main);
}

void Scheduler::run_threads() {
  Turns turns(block_threads_);
  while (alive_ > 0) {
    bool progress = false;
    for (const std::size_t i : turns.next_round(random_)) {
      Thread& thread = threads_[i];
      if (thread.state != State::ready) continue;
      progress = true;
      current_ = i;
      coordinates.thread = thread.index;
      scheduler_fibre_.switch_to(thread.fibre);
      if (error_ != cudaSuccess) return;
    }
    if (!progress) return record(cudaErrorLaunchFailure, join("deadlock:", describe_waiting()));
  }
}

void Scheduler::thread_main() {
  try {
    scheduler.run_thread_(scheduler.context_);
    scheduler.exit_thread();
  } catch (const LaunchStopped&) {
  }
  scheduler.threads_[scheduler.current_].fibre.switch_to(scheduler.scheduler_fibre_, true);
}

void Scheduler::exit_thread() {
  threads_[current_].state = State::exited;
  --alive_;
  const unsigned lane = current_ % kWarpSize;
  Warp& warp = current_warp();
  warp.running &= ~(1u << lane);
  if (barrier_.arrived > 0) {
    record(cudaErrorLaunchFailure, join("thread exited while others wait in ", describe_call(barrier_.call)));
  }
  for (const Meeting& meeting : warp.meetings) {
    if (meeting.arrived != 0 && (meeting.mask >> lane & 1)) {
      record(cudaErrorLaunchFailure,
             join("lane exited while others wait for it in ", describe_call(meeting.call)));
    }
  }
}

// ---- How threads meet -------------------------------------------------------------------------------------

void Scheduler::suspend(State state, const Call& call) {
  Thread& thread = threads_[current_];
  thread.state = state;
  thread.waiting_in = call;
  thread.fibre.switch_to(scheduler_fibre_);
}

BarrierVotes Scheduler::barrier(const Call& call, bool predicate) {
  count_step(call.site);
  if (alive_ != block_threads_) {
    fail(cudaErrorLaunchFailure,
         join(describe_call(call), " reached after other threads of the block have exited"));
  }
  if (barrier_.arrived == 0) {
    barrier_.call = call;
    barrier_.true_predicates = 0;
  } else if (!(barrier_.call == call)) {
    fail(cudaErrorLaunchFailure, join("divergent barrier: ", describe_call(call), " while others wait in ",
                                      describe_call(barrier_.call)));
  }
  barrier_.true_predicates += predicate;
  if (++barrier_.arrived < block_threads_) {
    suspend(State::at_barrier, call);
  } else {
    barrier_.arrived = 0;
    barrier_.last = {barrier_.true_predicates, static_cast<unsigned>(block_threads_)};
    for (std::size_t i = 0; i < block_threads_; ++i) threads_[i].state = State::ready;
    if (settings.order == Order::random) suspend(State::ready, call);
  }
  return barrier_.last;
}

const std::uint64_t* Scheduler::exchange(const Call& call, unsigned mask, std::uint64_t value) {
  count_step(call.site);
  const unsigned lane = current_ % kWarpSize;
  const unsigned self = 1u << lane;
  Warp& warp = current_warp();
  if (!(mask & self)) {
    fail(cudaErrorLaunchFailure, join(describe_call(call), ": the calling lane is not in its own mask"));
  }
  if (mask & ~warp.running) {
    fail(cudaErrorLaunchFailure,
         join(describe_call(call), ": the mask names lane ", std::countr_zero(mask & ~warp.running),
              ", which has exited or does not exist"));
  }

  Meeting* meeting = nullptr;
  for (Meeting& candidate : warp.meetings) {
    if (candidate.arrived == 0) {
      if (meeting == nullptr && candidate.unread == 0) meeting = &candidate;
    } else if (candidate.mask == mask) {
      if (!(candidate.call == call)) {
        fail(cudaErrorLaunchFailure,
             join("mismatched collective: ", describe_call(call), " while lanes of the same mask wait in ",
                  describe_call(candidate.call)));
      }
      meeting = &candidate;
      break;
    }
  }
  if (meeting->arrived == 0) {
    meeting->mask = mask;
    meeting->call = call;
    meeting->values.fill(~std::uint64_t{0});
  }
  meeting->values[lane] = value;
  meeting->arrived |= self;
  if (meeting->arrived != mask) {
    suspend(State::in_collective, call);
  } else {
    meeting->arrived = 0;
    meeting->unread = mask;
    const std::size_t first = current_ - lane;
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
      threads_[first + static_cast<unsigned>(std::countr_zero(lanes))].state = State::ready;
    }
    if (settings.order == Order::random) suspend(State::ready, call);
  }
  // The caller reads before any other thread runs.
  meeting->unread &= ~self;
  return meeting->values.data();
}

void Scheduler::count_step(const Site& site) {
  if (++steps_ > settings.step_limit) {
    fail(cudaErrorLaunchTimeout, join("spinning: more than ", settings.step_limit,
                                      " steps in one launch, now at ", site.file_name(), ":", site.line()));
  }
}

void Scheduler::step(const Site& site) {
  count_step(site);
  // A thread that waits for another one by atomics must let it run.
  const bool yield = settings.order == Order::random ? random_() % 4 == 0 : steps_ % 64 == 0;
  if (yield) suspend(State::ready, {"an atomic or a fence", site});
}

void* Scheduler::place_shared_array(std::size_t size, std::size_t alignment, const Site& site) {
  void* address = shared_.place_static(size, alignment);
  if (address == nullptr) {
    fail(cudaErrorLaunchFailure,
         join(describe_call({"the shared array", site}),
              " does not fit: a block has 48 KB, or 227 KB with cudaFuncSetAttribute if no more than "
              "48 KB of them are static"));
  }
  return address;
}

// ---- Errors -----------------------------------------------------------------------------------------------

void Scheduler::record(cudaError_t error, const std::string& reason) {
  if (error_ != cudaSuccess) return;  // the first one counts
  error_ = error;
  message_ = reason;
}

void Scheduler::fail(cudaError_t error, const std::string& reason) {
  record(error, join(reason, "; block ", describe_index(coordinates.block), ", thread ",
                     describe_index(coordinates.thread)));
  throw LaunchStopped();
}

std::string Scheduler::describe_waiting() const {
  std::map<std::string, std::size_t> waiting;
  for (std::size_t i = 0; i < block_threads_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state != State::exited) ++waiting[describe_call(thread.waiting_in)];
  }
  std::string text;
  for (const auto& [place, count] : waiting) text += join(" ", count, " threads wait in ", place, ";");
  return join(text, " block ", describe_index(coordinates.block));
}

}  // namespace

// ---- The interface of the header --------------------------------------------------------------------------

BarrierVotes barrier(const char* name, bool predicate, const Site& site) {
  return scheduler.barrier({name, site}, predicate);
}

const std::uint64_t* exchange(const char* name, unsigned mask, std::uint64_t value, const Site& site) {
  return scheduler.exchange({name, site}, mask, value);
}

void step(const Site& site) { scheduler.step(site); }

void trap(const char* reason, const Site& site) {
  scheduler.fail(cudaErrorLaunchFailure, describe_call({reason, site}));
}

void* dynamic_shared_memory() { return scheduler.dynamic_shared_memory(); }

void* SharedArray::place() {
  address_ = scheduler.place_shared_array(size_, alignment_, site_);
  block_ = current_block;
  return address_;
}

void launch(const LaunchShape& shape, const void* kernel, void (*run_thread)(const void*),
            const void* context) {
  const std::lock_guard lock(launch_mutex);
  const cudaError_t error = scheduler.run(shape, kernel, run_thread, context);
  if (error != cudaSuccess) {
    last_error = error;
    last_message = scheduler.message();
  }
}

cudaError_t take_last_error() { return std::exchange(last_error, cudaSuccess); }

const char* describe(cudaError_t error) { return error == cudaSuccess ? "no error" : last_message.c_str(); }

cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<std::size_t>(bytes) > kMaxShared) return cudaErrorInvalidValue;
  const std::lock_guard lock(launch_mutex);
  scheduler.dynamic_shared_limits[kernel] = static_cast<std::size_t>(bytes);
  return cudaSuccess;
}

}  // namespace dlmkern::emulator

// ---- For tests, through ctypes ----------------------------------------------------------------------------

#define DLMKERN_EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

DLMKERN_EMULATOR_EXPORT void dlmkern_emulator_configure(int order, std::uint64_t seed,
                                                        std::uint64_t step_limit) {
  dlmkern::emulator::settings = {static_cast<dlmkern::emulator::Order>(order), seed, step_limit};
}

DLMKERN_EMULATOR_EXPORT const char* dlmkern_emulator_last_message() {
  return dlmkern::emulator::last_message.c_str();
}
