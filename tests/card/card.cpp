/* A card that is none: torch's device for other makers' backends (PrivateUse1), computed by the CPU.

   What it has of a card is what offloading depends on. Its memory is out of the program's reach: it is protected, but
   while a kernel or a copy runs. Copies come from pinned memory, at a given rate and by threads, one for each stream,
   while the program goes on; from other memory they are waited for, and take twice as long. Kernels are torch's CPU
   kernels on copies of their arguments.

   Kernels run when they are launched, so that no race can be seen by what it breaks. Instead each stream keeps a vector
   clock of what it is ordered after (by streams that wait for events or for each other, and by a program that waits),
   and each access to the card's memory is held against earlier ones to the same bytes: two of which one writes, with no
   order between them, are a race. Memory is handed out again at once, to the stream that it was made for, as torch's
   allocator for CUDA does.

   Beside the time that passes there is one of the card's own, which no other work on the machine disturbs: kernels take
   as long as the test says, copies what a given rate makes of their bytes, one kernel and one copy at a time, each after
   what its stream is ordered after and after what the program has waited for.

   There are two such cards, "card:0" and "card:1", each with streams and a time of its own; they share their memory's
   size and what is counted of it. */

#define AT_PER_OPERATOR_HEADERS // those of all operators take most of the time that this is compiled in
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

namespace {

constexpr int CARDS = 2;
constexpr int LANES = 16; /* the first ones are the default streams of the cards */
constexpr size_t RESERVED = size_t(64) << 30; /* of addresses, not of memory */
constexpr size_t HUGE = size_t(2) << 20; /* bytes of a page that is quick to protect */

c10::Device card(int number) { return {c10::DeviceType::PrivateUse1, (c10::DeviceIndex)number}; }
bool is_default(int lane) { return lane < CARDS; }

using Clock = std::array<uint64_t, LANES>;
using Time = std::chrono::steady_clock;

void join(Clock &into, const Clock &other) {
    for (int lane = 0; lane < LANES; lane++) into[lane] = std::max(into[lane], other[lane]);
}

/* ---- The book: what was accessed when, under one lock ---- */

struct Access {
    size_t begin, end;
    int lane;
    uint64_t time;
    bool writes;
};

struct Block {
    char *base;
    size_t size;
    int lane; /* that it was made for */
    std::set<int> others; /* that it was recorded on */
    std::vector<Access> log;
};

struct Book {
    std::mutex lock;
    std::array<Clock, LANES> clocks{};
    Clock host{};
    std::map<char *, Block *> blocks; /* in use, by their first byte */
    std::map<std::pair<int, size_t>, std::vector<Block *>> free;
    char *memory = nullptr;
    size_t used = 0, allocated = 0, peak = 0, limit = size_t(8) << 30, pin_limit = SIZE_MAX;
    std::vector<std::string> races;
    int64_t async_copies = 0;
    size_t pinned = 0;
    std::set<std::pair<char *, size_t>> pinned_blocks;
    double rate = 0; /* bytes a second; 0: as fast as memory is */
    std::array<double, LANES> ends{}; /* in the card's own time: of what each stream has been given */
    double waited = 0; /* what the program has waited for */
    double own_rate = 0; /* bytes a second of copies; 0: none takes any */
    std::array<int, LANES> cards{0, 1}; /* that streams belong to */
    std::array<std::array<double, 2>, CARDS> free_at{}, busy{}; /* of what computes and of what copies, by card */
} book;

thread_local int device = 0;
thread_local std::array<int, CARDS> streams{0, 1}; /* the current one of each card */
thread_local double next_seconds = 0;              /* of the next kernel */
int &current() { return streams[device]; }
int index_of(c10::Device of) { return of.has_index() ? of.index() : device; }

/* While it lives, another card is the current one. */
struct On {
    const int before = device;
    explicit On(int number) { device = number; }
    ~On() { device = before; }
};
thread_local bool in_kernel = false;

const char *word(bool writes) { return writes ? "write" : "read"; }

/* An access by something that `lane` runs now. Under the lock. */
void access(const void *pointer, size_t bytes, int lane, bool writes, const char *what) {
    char *begin = (char *)pointer;
    auto found = book.blocks.upper_bound(begin);
    if (!bytes || found == book.blocks.begin()) return;
    Block *block = std::prev(found)->second;
    const size_t from = begin - block->base, to = from + bytes;
    if (from >= block->size) return;
    Clock &clock = book.clocks[lane];
    std::vector<Access> kept;
    for (const Access &one : block->log) {
        const bool apart = one.end <= from || one.begin >= to;
        if (!apart && one.lane != lane && (writes || one.writes) && one.time > clock[one.lane] && book.races.size() < 50) {
            std::ostringstream text;
            text << what << ": a " << word(writes) << " by stream " << lane << " is not ordered after a " << word(one.writes)
                 << " by stream " << one.lane << " of the same bytes";
            book.races.push_back(text.str());
        }
        /* A write stands for all before it of its bytes, a read for those of its own stream. */
        const bool inside = one.begin >= from && one.end <= to;
        if (!(inside && (writes || (one.lane == lane && !one.writes)))) kept.push_back(one);
    }
    kept.push_back({from, to, lane, clock[lane], writes});
    block->log = std::move(kept);
}

/* Something new that `lane` runs: it comes after what the program has waited for. Under the lock. */
void launch(int lane) {
    join(book.clocks[lane], book.host);
    book.clocks[lane][lane]++;
}

/* The card's own time of something that `lane` runs now. Under the lock. */
void spend(int lane, int engine, double seconds) {
    double &end = book.ends[lane];
    end = std::max(end, book.waited);
    if (seconds <= 0) return;
    double &free_at = book.free_at[book.cards[lane]][engine];
    free_at = end = std::max(end, free_at) + seconds;
    book.busy[book.cards[lane]][engine] += seconds;
}

std::pair<char *, size_t> bytes_of(const at::Tensor &tensor) {
    if (!tensor.numel()) return {nullptr, 0};
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
    return {(char *)tensor.const_data_ptr(), (last + 1) * tensor.element_size()};
}

/* ---- The protection of the card's memory ---- */

std::mutex gate;
int inside = 0;
size_t opened = 0;

struct Open {
    Open() {
        std::lock_guard<std::mutex> hold(gate);
        const size_t used = (book.used + HUGE - 1) / HUGE * HUGE;
        if (!inside++ || opened < used) mprotect(book.memory, opened = used, PROT_READ | PROT_WRITE);
    }
    ~Open() {
        std::lock_guard<std::mutex> hold(gate);
        if (!--inside) mprotect(book.memory, opened, PROT_NONE);
    }
};

/* ---- Streams. Number 0 is the default one, whose work is done when it is given ---- */

struct Lane {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    uint64_t issued = 0, done = 0;
    bool started = false;

    uint64_t push(std::function<void()> task) {
        std::lock_guard<std::mutex> hold(lock);
        if (!started) {
            started = true;
            std::thread([this] { run(); }).detach();
        }
        work.push_back(std::move(task));
        changed.notify_all();
        return ++issued;
    }
    void run() {
        for (;;) {
            std::unique_lock<std::mutex> hold(lock);
            changed.wait(hold, [this] { return !work.empty(); });
            auto task = std::move(work.front());
            work.pop_front();
            hold.unlock();
            task();
            hold.lock();
            done++;
            changed.notify_all();
        }
    }
    bool is_done(uint64_t number) {
        std::lock_guard<std::mutex> hold(lock);
        return done >= number;
    }
    void wait(uint64_t number) {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [&] { return done >= number; });
    }
    void wait() {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [this] { return done >= issued; });
    }
};

Lane &lane_of(int number) {
    static Lane *all = new Lane[LANES]; /* never destroyed: threads wait in them when the process ends */
    return all[number];
}
std::atomic<int> made{CARDS};

struct Event {
    Clock clock{};
    int lane = 0;
    uint64_t number = 0;
    double end = 0;
    Time::time_point at = Time::now();
};

std::mutex bus; /* one copy at a time, as over one connection */

void carry(void *to, const void *from, size_t bytes, double share) {
    std::lock_guard<std::mutex> hold(bus);
    const auto begin = Time::now();
    {
        Open open;
        memcpy(to, from, bytes);
    }
    if (book.rate > 0)
        std::this_thread::sleep_until(begin + std::chrono::duration_cast<Time::duration>(
                                                  std::chrono::duration<double>(bytes / (book.rate * share))));
}

/* ---- Memory ---- */

void release(void *context) {
    Block *block = (Block *)context;
    std::set<int> others;
    {
        std::lock_guard<std::mutex> hold(book.lock);
        others = block->others;
    }
    for (int lane : others)
        if (!is_default(lane)) lane_of(lane).wait(); /* a card's allocator would look again later */
    std::lock_guard<std::mutex> hold(book.lock);
    std::vector<Access> kept;
    for (const Access &one : block->log)
        if (!others.count(one.lane)) kept.push_back(one);
    block->log = kept;
    block->others.clear();
    book.blocks.erase(block->base);
    book.allocated -= block->size;
    book.free[{block->lane, block->size}].push_back(block);
}

struct CardAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        if (!bytes) return {nullptr, nullptr, nullptr, card(device)};
        const size_t size = (bytes + 511) / 512 * 512;
        std::lock_guard<std::mutex> hold(book.lock);
        TORCH_CHECK_WITH(OutOfMemoryError, book.allocated + size <= book.limit, "The card is out of memory: ", size,
                         " bytes more than ", book.allocated, " of ", book.limit);
        auto &free = book.free[{current(), size}];
        Block *block;
        if (free.empty()) {
            TORCH_CHECK(book.used + size <= RESERVED, "The card is out of addresses");
            block = new Block{book.memory + book.used, size, current(), {}, {}};
            book.used += size;
        } else {
            block = free.back();
            free.pop_back();
        }
        book.blocks[block->base] = block;
        book.allocated += size;
        book.peak = std::max(book.peak, book.allocated);
        return {block->base, block, &release, card(device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, std::size_t bytes) const override {
        Open open;
        memcpy(to, from, bytes);
    }
};
CardAllocator allocator;

struct Pinned {
    char *base;
    size_t size;
};

bool is_pinned(const void *pointer) {
    std::lock_guard<std::mutex> hold(book.lock);
    auto found = book.pinned_blocks.upper_bound({(char *)pointer, SIZE_MAX});
    if (found == book.pinned_blocks.begin()) return false;
    --found;
    return (char *)pointer < found->first + found->second;
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        std::lock_guard<std::mutex> hold(book.lock);
        TORCH_CHECK(book.pinned + bytes <= book.pin_limit, "The system pins no more than ", book.pin_limit, " bytes");
        auto *one = new Pinned{(char *)aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), bytes};
        book.pinned_blocks.insert({one->base, bytes});
        book.pinned += bytes;
        return {one->base, one, &give, c10::Device(c10::DeviceType::CPU)};
    }
    static void give(void *context) {
        auto *one = (Pinned *)context;
        for (int lane = CARDS; lane < LANES; lane++) lane_of(lane).wait(); /* what still copies from it */
        std::lock_guard<std::mutex> hold(book.lock);
        book.pinned_blocks.erase({one->base, one->size});
        book.pinned -= one->size;
        free(one->base);
        delete one;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give; }
    void copy_data(void *to, const void *from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

/* ---- What torch asks a device ---- */

c10::Stream stream(int lane) { return c10::Stream(c10::Stream::UNSAFE, card(book.cards[lane]), lane); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
    c10::Device exchangeDevice(c10::Device to) const override {
        const c10::Device before = card(device);
        device = index_of(to);
        return before;
    }
    c10::Device getDevice() const override { return card(device); }
    void setDevice(c10::Device to) const override { device = index_of(to); }
    void uncheckedSetDevice(c10::Device to) const noexcept override { device = index_of(to); }
    c10::Stream getStream(c10::Device of) const override { return stream(streams[index_of(of)]); }
    c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of)); }
    c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
    c10::Stream getNewStream(c10::Device of, int) const override {
        const int number = made++, lane = number < LANES ? number : CARDS + number % (LANES - CARDS);
        std::lock_guard<std::mutex> hold(book.lock);
        book.cards[lane] = index_of(of);
        return stream(lane);
    }
    c10::Stream exchangeStream(c10::Stream other) const override {
        int &of_card = streams[index_of(other.device())];
        const int before = of_card;
        of_card = (int)other.id();
        return stream(before);
    }
    c10::DeviceIndex deviceCount() const noexcept override { return CARDS; }
    void record(void **event, const c10::Stream &on, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        auto *one = (Event *)*event;
        one->lane = (int)on.id();
        {
            std::lock_guard<std::mutex> hold(book.lock);
            join(book.clocks[one->lane], book.host);
            one->clock = book.clocks[one->lane];
            one->end = std::max(book.ends[one->lane], book.waited);
        }
        one->at = Time::now();
        one->number = !is_default(one->lane) ? lane_of(one->lane).push([one] { one->at = Time::now(); }) : 0;
    }
    void block(void *event, const c10::Stream &on) const override {
        if (!event) return;
        auto *one = (Event *)event;
        const int lane = (int)on.id(), other = one->lane;
        const uint64_t number = one->number;
        {
            std::lock_guard<std::mutex> hold(book.lock);
            join(book.clocks[lane], one->clock);
            book.ends[lane] = std::max(book.ends[lane], one->end);
        }
        if (is_default(other) || other == lane) return;
        if (!is_default(lane)) lane_of(lane).push([other, number] { lane_of(other).wait(number); });
        else lane_of(other).wait(number); /* the default stream's work is done when it is given */
    }
    bool queryEvent(void *event) const override {
        if (!event) return true;
        auto *one = (Event *)event;
        const bool really = is_default(one->lane) || lane_of(one->lane).is_done(one->number);
        std::lock_guard<std::mutex> hold(book.lock);
        /* In the card's own time the program is as far as what it has waited for, however slow this machine is. */
        const bool over = really && (book.own_rate <= 0 || one->end <= book.waited);
        if (over) join(book.host, one->clock);
        return over;
    }
    void synchronizeEvent(void *event) const override {
        if (!event) return;
        auto *one = (Event *)event;
        if (!is_default(one->lane)) lane_of(one->lane).wait(one->number);
        std::lock_guard<std::mutex> hold(book.lock);
        join(book.host, one->clock);
        book.waited = std::max(book.waited, one->end);
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        auto *one = (Event *)event;
        if (one && !is_default(one->lane)) lane_of(one->lane).wait(one->number);
        delete one;
    }
    bool queryStream(const c10::Stream &on) const override {
        Lane &lane = lane_of(on.id());
        std::lock_guard<std::mutex> hold(lane.lock);
        return lane.done >= lane.issued;
    }
    void synchronizeStream(const c10::Stream &on) const override {
        lane_of(on.id()).wait();
        std::lock_guard<std::mutex> hold(book.lock);
        join(book.host, book.clocks[on.id()]);
        book.waited = std::max(book.waited, book.ends[on.id()]);
    }
    void synchronizeDevice(const c10::DeviceIndex of) const override {
        for (int lane = 0; lane < LANES; lane++)
            if (of < 0 || book.cards[lane] == of) synchronizeStream(stream(lane));
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override {
        return std::chrono::duration<double, std::milli>(((Event *)second)->at - ((Event *)first)->at).count();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return CARDS; }
    c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)device; }
    void setCurrentDevice(c10::DeviceIndex to) const override { device = to; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
        const int before = device;
        if (to >= 0) device = to;
        return (c10::DeviceIndex)before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
    bool isPinnedPtr(const void *pointer) const override { return is_pinned(pointer); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    at::Device getDeviceFromPtr(void *pointer) const override {
        std::lock_guard<std::mutex> hold(book.lock);
        auto found = book.blocks.upper_bound((char *)pointer);
        return card(found == book.blocks.begin() ? 0 : book.cards[std::prev(found)->second->lane]);
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const override {
        c10::DataPtr fresh = allocator.allocate(size);
        if (storage.nbytes() && size) {
            Open open;
            memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
        }
        storage.set_data_ptr_noswap(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(size);
    }
};

/* ---- Operators ---- */

bool on_card(const at::Tensor &tensor) { return tensor.device().type() == c10::DeviceType::PrivateUse1; }

at::Tensor make(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                std::optional<at::Device> of, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    On there(of ? index_of(*of) : device);
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor make_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device> of,
                        std::optional<bool>) {
    On there(of ? index_of(*of) : device);
    return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

/* The bytes of a tensor on the card, and how they lie, in a tensor of the CPU. */
at::Tensor fetched(const at::Tensor &tensor) {
    at::Tensor here = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    auto [from, bytes] = bytes_of(tensor);
    Open open;
    if (bytes) memcpy(here.data_ptr(), from, bytes);
    return here;
}

void put(const at::Tensor &here, const at::Tensor &tensor) {
    auto [to, bytes] = bytes_of(tensor);
    Open open;
    if (bytes) memcpy(to, here.const_data_ptr(), bytes);
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
    if (!to.numel()) return to;
    if (in_kernel) { /* what a kernel does: nothing waits for it, and nothing is written into the book */
        at::Tensor here = on_card(to) ? fetched(to) : to;
        here.copy_(on_card(from) ? fetched(from) : from);
        if (on_card(to)) put(here, to);
        return to;
    }
    On there(index_of(on_card(to) ? to.device() : from.device()));
    const int lane = current();
    const bool alike = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
                       from.strides() == to.strides() && to.is_non_overlapping_and_dense();
    const at::Tensor &host = on_card(to) ? from : to;
    const bool both = on_card(from) && on_card(to);
    const bool direct = alike && !both, async = direct && non_blocking && is_pinned(host.const_data_ptr());
    {
        std::lock_guard<std::mutex> hold(book.lock);
        launch(lane);
        if (on_card(from)) access(bytes_of(from).first, bytes_of(from).second, lane, false, "copy");
        if (on_card(to)) access(bytes_of(to).first, bytes_of(to).second, lane, true, "copy");
        if (async && !is_default(lane)) book.async_copies++;
        spend(lane, 1, direct && book.own_rate > 0 ? bytes_of(to).second / book.own_rate : 0);
    }
    if (direct) {
        char *into = bytes_of(to).first;
        const char *out = bytes_of(from).first;
        const size_t bytes = bytes_of(to).second;
        if (async && !is_default(lane)) {
            lane_of(lane).push([=] { carry(into, out, bytes, 1); });
            return to;
        }
        if (!is_default(lane)) lane_of(lane).wait();
        carry(into, out, bytes, is_pinned(host.const_data_ptr()) ? 1 : 0.5);
    } else {
        if (!is_default(lane)) lane_of(lane).wait();
        at::Tensor here = on_card(to) ? fetched(to) : to;
        here.copy_(on_card(from) ? fetched(from) : from);
        if (on_card(to)) put(here, to);
    }
    if (!both && !async) { /* the program has waited */
        std::lock_guard<std::mutex> hold(book.lock);
        join(book.host, book.clocks[lane]);
        book.waited = std::max(book.waited, book.ends[lane]);
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    at::native::resize_(to, from.sizes(), std::nullopt);
    return copy_from(from, to, false);
}

at::Scalar scalar(const at::Tensor &tensor) {
    at::Tensor here = at::empty_like(tensor, tensor.options().device(at::kCPU));
    copy_from(tensor, here, false);
    return here.item();
}

void record_stream(at::Tensor &tensor, c10::Stream on) {
    std::lock_guard<std::mutex> hold(book.lock);
    auto found = book.blocks.find((char *)tensor.storage().data());
    if (found != book.blocks.end() && found->second->lane != on.id()) found->second->others.insert((int)on.id());
}

at::Tensor &set_storage(at::Tensor &self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::cpu::set_(self, storage, offset, size, stride);
}

void tensors_of(const c10::IValue &value, std::vector<at::Tensor> &into) {
    if (value.isTensor() && value.toTensor().defined()) into.push_back(value.toTensor());
    if (value.isTensorList())
        for (const at::Tensor &one : value.toTensorVector()) into.push_back(one);
    if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor> &one : value.toOptionalTensorList())
            if (one && one->defined()) into.push_back(*one);
}

/* Every other operator: torch's CPU kernel, on copies. */
void kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const size_t count = schema.arguments().size(), first = stack->size() - count;
    const std::string name = schema.operator_name().name;
    int where = device; /* the card of the first argument that is on one */
    for (size_t i = count; i-- > 0;) {
        std::vector<at::Tensor> found;
        tensors_of((*stack)[first + i], found);
        for (const at::Tensor &one : found)
            if (on_card(one)) where = index_of(one.device());
    }
    On there(where);
    const int lane = current();
    if (!is_default(lane)) lane_of(lane).wait();
    const bool outer = !in_kernel;
    if (outer) {
        std::lock_guard<std::mutex> hold(book.lock);
        launch(lane);
        spend(lane, 0, next_seconds);
        next_seconds = 0;
        for (size_t i = 0; i < count; i++) {
            std::vector<at::Tensor> found;
            tensors_of((*stack)[first + i], found);
            const auto *alias = schema.arguments()[i].alias_info();
            for (const at::Tensor &one : found)
                if (on_card(one)) access(bytes_of(one).first, bytes_of(one).second, lane, alias && alias->isWrite(), name.c_str());
        }
    }
    in_kernel = true;
    try {
        at::native::cpu_fallback(op, stack);
    } catch (...) {
        in_kernel = !outer;
        throw;
    }
    in_kernel = !outer;
    if (!outer) return;
    std::lock_guard<std::mutex> hold(book.lock);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
        std::vector<at::Tensor> found;
        tensors_of((*stack)[i], found);
        for (const at::Tensor &one : found)
            if (on_card(one)) access(bytes_of(one).first, bytes_of(one).second, lane, true, name.c_str());
    }
}

at::Tensor convolution(const at::Tensor &x, const at::Tensor &weight, const std::optional<at::Tensor> &bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
    return at::native::call_fallback_fn_symint<&kernel, at::_ops::convolution>::call(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &make);
    library.impl("empty_strided", &make_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_local_scalar_dense", &scalar);
    library.impl("record_stream", &record_stream);
    library.impl("set_.source_Storage_storage_offset", &set_storage);
    library.impl("convolution_overrideable", &convolution);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("view", &at::native::view);
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("unfold", &at::native::unfold);
    library.impl("resize_", [](const at::Tensor &self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format)
                                -> const at::Tensor & { return at::native::resize_(self, size, format); });
}

struct Begin {
    Begin() {
        void *found = mmap(nullptr, RESERVED + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(found != MAP_FAILED, "The card has no addresses");
        book.memory = (char *)(((size_t)found + HUGE - 1) / HUGE * HUGE);
        madvise(book.memory, RESERVED, MADV_HUGEPAGE);
        c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator);
        at::RegisterPrivateUse1HooksInterface(new Hooks);
    }
} begin;

} // namespace

/* ---- For tests, by ctypes ---- */

extern "C" {
void card_rate(double bytes_a_second) { book.rate = bytes_a_second; }
void card_own_rate(double bytes_a_second) { book.own_rate = bytes_a_second; }
void card_next(double seconds) { next_seconds = seconds; }
double card_end(int number) { return std::max(book.ends[number], book.waited); }
double card_busy(int number, int engine) { return book.busy[number][engine]; }
void card_limit(int64_t bytes) { book.limit = bytes; }
void card_pin_limit(int64_t bytes) { book.pin_limit = bytes < 0 ? SIZE_MAX : bytes; }
int card_register(void *address, int64_t bytes) {
    std::lock_guard<std::mutex> hold(book.lock);
    if (book.pinned + bytes > book.pin_limit) return 2;
    book.pinned_blocks.insert({(char *)address, (size_t)bytes});
    book.pinned += bytes;
    return 0;
}
int card_unregister(void *address) {
    std::lock_guard<std::mutex> hold(book.lock);
    auto found = book.pinned_blocks.lower_bound({(char *)address, 0});
    if (found == book.pinned_blocks.end() || found->first != address) return 1;
    book.pinned -= found->second;
    book.pinned_blocks.erase(found);
    return 0;
}
int64_t card_total() { return book.limit; }
void card_forget_races() { book.races.clear(); }
int card_races() { return (int)book.races.size(); }
const char *card_race(int number) { return book.races[number].c_str(); }
int64_t card_allocated() { return book.allocated; }
int64_t card_peak() { return book.peak; }
void card_reset_peak() { book.peak = book.allocated; }
int64_t card_pinned() { return book.pinned; }
int64_t card_async_copies() { return book.async_copies; }
}
