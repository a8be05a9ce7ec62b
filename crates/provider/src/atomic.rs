//! Executes remote atomic operations on the target's memory.
//!
//! Apart from this memory the functions are pure: operands and results are bytes, in the machine's
//! byte order and at any alignment. The function that executes an operation also decides which
//! operations a type has, so both always agree. All atomic operations of this process exclude each
//! other, whichever endpoint received them; plain loads and stores of the program are not excluded
//! (libfabric's contract).

use crate::abi::*;
use crate::info::INJECT_SIZE;
use crate::sync::SpinLock;

/// Maximum number of bytes that a call changes: the operands of one frame, which also fit an
/// inject.
pub const BYTES_MAX: usize = landbridge_proto::limit::ATOMIC_BYTES_MAX;
const _: () = assert!(BYTES_MAX <= INJECT_SIZE);

/// The kind of a call, which decides which operations are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// `fi_atomic`: no result is returned.
    Update,
    /// `fi_fetch_atomic`
    Fetch,
    /// `fi_compare_atomic`
    Compare,
}

static SERIAL: SpinLock<()> = SpinLock::new(());

/// Size of an element in bytes; `None` for an unknown type.
pub fn element_bytes(datatype: u32) -> Option<usize> {
    dispatch(datatype, Size)
}

/// Whether `op` on `datatype` is offered in calls of this kind.
pub fn supports(kind: AtomicKind, datatype: u32, op: u32) -> bool {
    let fits = match kind {
        AtomicKind::Update => op <= OP_BXOR || op == OP_WRITE,
        AtomicKind::Fetch => op <= OP_WRITE,
        AtomicKind::Compare => (OP_CSWAP..=OP_MSWAP).contains(&op),
    };
    fits && dispatch(datatype, SupportCheck { op }).unwrap_or(false)
}

/// Applies `op` to `count` elements at `target`. `result`, unless empty, receives the previous
/// values. `operand` is empty for FI_ATOMIC_READ, `compare` for all operations but the swaps.
///
/// An element that keeps its value is not stored: a read works on read-only memory, and does not
/// overwrite what the program itself stores meanwhile.
///
/// # Safety
/// `target` points to `count` elements of readable memory, which is also writable unless the
/// operation keeps all values.
pub unsafe fn apply(
    op: u32,
    datatype: u32,
    target: *mut u8,
    operand: &[u8],
    compare: &[u8],
    result: &mut [u8],
    count: usize,
) -> Result<(), Errno> {
    let bytes = element_bytes(datatype).and_then(|size| size.checked_mul(count));
    let bytes = bytes.ok_or(Errno::EINVAL)?;
    let complete = |given: &[u8], needed: bool| given.len() >= if needed { bytes } else { 0 };
    if !complete(operand, op != OP_READ)
        || !complete(compare, op >= OP_CSWAP)
        || !complete(result, !result.is_empty())
    {
        return Err(Errno::EINVAL);
    }
    let _serial = SERIAL.lock();
    dispatch(datatype, Apply { op, target, operand, compare, result, count })
        .unwrap_or(Err(Errno::EOPNOTSUPP))
}

/// An operation on an element type that is known only at run time.
trait Visit {
    type Output;
    fn visit<T: Element>(self) -> Self::Output;
}

fn dispatch<V: Visit>(datatype: u32, visitor: V) -> Option<V::Output> {
    Some(match datatype {
        INT8 => visitor.visit::<i8>(),
        UINT8 => visitor.visit::<u8>(),
        INT16 => visitor.visit::<i16>(),
        UINT16 => visitor.visit::<u16>(),
        INT32 => visitor.visit::<i32>(),
        UINT32 => visitor.visit::<u32>(),
        INT64 => visitor.visit::<i64>(),
        UINT64 => visitor.visit::<u64>(),
        INT128 => visitor.visit::<i128>(),
        UINT128 => visitor.visit::<u128>(),
        FLOAT => visitor.visit::<f32>(),
        DOUBLE => visitor.visit::<f64>(),
        FLOAT_COMPLEX => visitor.visit::<Complex<f32>>(),
        DOUBLE_COMPLEX => visitor.visit::<Complex<f64>>(),
        #[cfg(target_arch = "x86_64")]
        LONG_DOUBLE => visitor.visit::<x87::LongDouble>(),
        #[cfg(target_arch = "x86_64")]
        LONG_DOUBLE_COMPLEX => visitor.visit::<Complex<x87::LongDouble>>(),
        _ => return None,
    })
}

struct Size;

impl Visit for Size {
    type Output = usize;
    fn visit<T: Element>(self) -> usize {
        size_of::<T>()
    }
}

struct SupportCheck {
    op: u32,
}

impl Visit for SupportCheck {
    type Output = bool;
    fn visit<T: Element>(self) -> bool {
        T::combine(self.op, T::ZERO, T::ZERO, T::ZERO).is_some()
    }
}

struct Apply<'a> {
    op: u32,
    target: *mut u8,
    operand: &'a [u8],
    compare: &'a [u8],
    result: &'a mut [u8],
    count: usize,
}

impl Visit for Apply<'_> {
    type Output = Result<(), Errno>;

    fn visit<T: Element>(self) -> Result<(), Errno> {
        for index in 0..self.count {
            // SAFETY: the caller of `apply` guarantees `count` elements at the target; the slices
            // have been measured, and an empty slice is not touched. No alignment is assumed.
            unsafe {
                let target = self.target.cast::<T>().add(index);
                let old = target.read_unaligned();
                let operand = element(self.operand, index);
                let compare = element(self.compare, index);
                let new = T::combine(self.op, old, operand, compare).ok_or(Errno::EOPNOTSUPP)?;
                if !self.result.is_empty() {
                    self.result.as_mut_ptr().cast::<T>().add(index).write_unaligned(old);
                }
                if bytes_of(&new) != bytes_of(&old) {
                    target.write_unaligned(new);
                }
            }
        }
        Ok(())
    }
}

/// The bits of a value, which distinguish more than `==` does (0 and -0, or NaN values).
fn bytes_of<T: Element>(value: &T) -> &[u8] {
    // SAFETY: elements are numbers without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// # Safety
/// `bytes` is empty or holds `index + 1` elements.
unsafe fn element<T: Element>(bytes: &[u8], index: usize) -> T {
    if bytes.is_empty() {
        return T::ZERO;
    }
    // SAFETY: the caller guarantees the element.
    unsafe { bytes.as_ptr().cast::<T>().add(index).read_unaligned() }
}

/// A type on which atomic operations work. Every bit pattern is a value.
trait Element: Copy {
    const ZERO: Self;

    /// The new value; `None`: the type does not have this operation.
    fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self>;
}

macro_rules! integers {
    ($($integer:ty),*) => {
        $(
            impl Element for $integer {
                const ZERO: Self = 0;

                fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
                    let truth = |value: bool| Some(Self::from(value));
                    match op {
                        OP_SUM => Some(old.wrapping_add(operand)),
                        OP_PROD => Some(old.wrapping_mul(operand)),
                        OP_BOR => Some(old | operand),
                        OP_BAND => Some(old & operand),
                        OP_BXOR => Some(old ^ operand),
                        OP_LOR => truth(old != 0 || operand != 0),
                        OP_LAND => truth(old != 0 && operand != 0),
                        OP_LXOR => truth((old != 0) != (operand != 0)),
                        OP_MSWAP => Some((operand & compare) | (old & !compare)),
                        _ => ordered(op, old, operand, compare),
                    }
                }
            }
        )*
    };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64, i128, u128);

/// The operations that need only an order.
fn ordered<T: PartialOrd + Copy>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let swap_if = |condition: bool| Some(if condition { operand } else { old });
    match op {
        OP_MIN => swap_if(operand < old),
        OP_MAX => swap_if(operand > old),
        OP_CSWAP_LE => swap_if(compare <= old),
        OP_CSWAP_LT => swap_if(compare < old),
        OP_CSWAP_GE => swap_if(compare >= old),
        OP_CSWAP_GT => swap_if(compare > old),
        _ => equated(op, old, operand, compare),
    }
}

/// The operations that need only equality.
fn equated<T: PartialEq + Copy>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let swap_if = |condition: bool| Some(if condition { operand } else { old });
    match op {
        OP_READ => Some(old),
        OP_WRITE => Some(operand),
        OP_CSWAP => swap_if(compare == old),
        OP_CSWAP_NE => swap_if(compare != old),
        _ => None,
    }
}

/// A floating-point type.
trait Real: Copy + PartialOrd {
    const ZERO: Self;
    const ONE: Self;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

macro_rules! reals {
    ($($real:ty),*) => {
        $(
            impl Real for $real {
                const ZERO: Self = 0.0;
                const ONE: Self = 1.0;
                fn plus(self, other: Self) -> Self {
                    self + other
                }
                fn minus(self, other: Self) -> Self {
                    self - other
                }
                fn times(self, other: Self) -> Self {
                    self * other
                }
            }

            impl Element for $real {
                const ZERO: Self = <$real as Real>::ZERO;
                fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
                    real_combine(op, old, operand, compare)
                }
            }
        )*
    };
}

reals!(f32, f64);

fn real_combine<T: Real>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let truth = |value: bool| Some(if value { T::ONE } else { T::ZERO });
    let (a, b) = (old != T::ZERO, operand != T::ZERO);
    match op {
        OP_SUM => Some(old.plus(operand)),
        OP_PROD => Some(old.times(operand)),
        OP_LOR => truth(a || b),
        OP_LAND => truth(a && b),
        OP_LXOR => truth(a != b),
        _ => ordered(op, old, operand, compare),
    }
}

#[derive(Clone, Copy, PartialEq)]
#[repr(C)]
struct Complex<T> {
    real: T,
    imaginary: T,
}

impl<T: Real> Element for Complex<T> {
    const ZERO: Self = Complex { real: T::ZERO, imaginary: T::ZERO };

    fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
        let truth = |value: bool| {
            Some(Complex { real: if value { T::ONE } else { T::ZERO }, imaginary: T::ZERO })
        };
        let (a, b) = (old != Self::ZERO, operand != Self::ZERO);
        match op {
            OP_SUM => Some(Complex {
                real: old.real.plus(operand.real),
                imaginary: old.imaginary.plus(operand.imaginary),
            }),
            OP_PROD => Some(Complex {
                real: old.real.times(operand.real).minus(old.imaginary.times(operand.imaginary)),
                imaginary: old
                    .real
                    .times(operand.imaginary)
                    .plus(old.imaginary.times(operand.real)),
            }),
            OP_LOR => truth(a || b),
            OP_LAND => truth(a && b),
            OP_LXOR => truth(a != b),
            _ => equated(op, old, operand, compare),
        }
    }
}

/// C's `long double` on x86-64: ten bytes of x87 extended precision in sixteen bytes.
#[cfg(target_arch = "x86_64")]
mod x87 {
    use std::arch::asm;
    use std::cmp::Ordering;

    use super::{Element, Real, real_combine};

    #[derive(Clone, Copy)]
    #[repr(C, align(16))]
    pub struct LongDouble([u8; 16]);

    impl LongDouble {
        #[cfg(test)]
        pub fn of(value: f64) -> LongDouble {
            let mut wide = LongDouble([0; 16]);
            // SAFETY: the instructions load eight bytes and store ten; the x87 stack is unchanged
            // afterwards.
            unsafe {
                asm!(
                    "fld qword ptr [{value}]", "fstp tbyte ptr [{wide}]",
                    value = in(reg) &value, wide = in(reg) &mut wide.0,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            wide
        }

        #[cfg(test)]
        pub fn to_bytes(self) -> [u8; 16] {
            self.0
        }

        /// `first > second`; false if either is NaN.
        fn exceeds(first: &Self, second: &Self) -> bool {
            let above: u8;
            // SAFETY: the instructions load ten bytes each; the x87 stack is unchanged afterwards.
            unsafe {
                asm!(
                    "fld tbyte ptr [{second}]", "fld tbyte ptr [{first}]",
                    "fcomip st, st(1)", "fstp st(0)", "seta {above}",
                    first = in(reg) &first.0, second = in(reg) &second.0,
                    above = out(reg_byte) above,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            above != 0
        }

        /// Whether neither value is NaN.
        fn comparable(first: &Self, second: &Self) -> bool {
            let ordered: u8;
            // SAFETY: the instructions load ten bytes each; the x87 stack is unchanged afterwards.
            unsafe {
                asm!(
                    "fld tbyte ptr [{second}]", "fld tbyte ptr [{first}]",
                    "fucomip st, st(1)", "fstp st(0)", "setnp {ordered}",
                    first = in(reg) &first.0, second = in(reg) &second.0,
                    ordered = out(reg_byte) ordered,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            ordered != 0
        }
    }

    macro_rules! arithmetic {
        ($name:ident, $instruction:literal) => {
            fn $name(self, other: Self) -> Self {
                let mut result = LongDouble([0; 16]);
                // SAFETY: the instructions load ten bytes each and store ten; the x87 stack is
                // unchanged afterwards.
                unsafe {
                    asm!(
                        "fld tbyte ptr [{first}]", "fld tbyte ptr [{second}]",
                        $instruction, "fstp tbyte ptr [{result}]",
                        first = in(reg) &self.0, second = in(reg) &other.0,
                        result = in(reg) &mut result.0,
                        out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                        out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                    );
                }
                result
            }
        };
    }

    impl Real for LongDouble {
        const ZERO: Self = LongDouble([0; 16]);
        const ONE: Self = LongDouble([0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f, 0, 0, 0, 0, 0, 0]);

        arithmetic!(plus, "faddp st(1), st");
        arithmetic!(minus, "fsubp st(1), st");
        arithmetic!(times, "fmulp st(1), st");
    }

    impl PartialEq for LongDouble {
        fn eq(&self, other: &Self) -> bool {
            self.partial_cmp(other) == Some(Ordering::Equal)
        }
    }

    impl PartialOrd for LongDouble {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            if !Self::comparable(self, other) {
                return None;
            }
            Some(match (Self::exceeds(self, other), Self::exceeds(other, self)) {
                (true, _) => Ordering::Greater,
                (_, true) => Ordering::Less,
                _ => Ordering::Equal,
            })
        }
    }

    impl Element for LongDouble {
        const ZERO: Self = <Self as Real>::ZERO;
        fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
            real_combine(op, old, operand, compare)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    const DATATYPES: u32 = 14;
    const OPS: u32 = 19;
    const INTEGERS: std::ops::RangeInclusive<u32> = INT8..=UINT64;
    const COMPLEX: [u32; 3] = [FLOAT_COMPLEX, DOUBLE_COMPLEX, LONG_DOUBLE_COMPLEX];

    /// Verifies the whole table by rules: 14 types times 19 operations in three kinds of call.
    #[test]
    fn exactly_the_operations_that_make_sense_are_offered() {
        for datatype in 0..DATATYPES {
            for op in 0..OPS {
                let sensible = is_sensible(datatype, op);
                let (update, fetch, compare) = match op {
                    OP_READ => (false, true, false),
                    OP_CSWAP.. => (false, false, true),
                    _ => (true, true, false),
                };
                for (kind, fits) in [
                    (AtomicKind::Update, update),
                    (AtomicKind::Fetch, fetch),
                    (AtomicKind::Compare, compare),
                ] {
                    let offered = supports(kind, datatype, op);
                    assert_eq!(offered, fits && sensible, "{kind:?} type {datatype} op {op}");
                }
            }
        }
        assert!(!supports(AtomicKind::Update, DATATYPES + 2, OP_SUM), "half floats");
        assert!(!supports(AtomicKind::Update, INT32, OPS), "FI_DIFF");
    }

    /// Every offered combination can be executed, and the others change nothing.
    #[test]
    fn what_is_offered_works_and_what_is_not_is_refused() {
        for datatype in 0..DATATYPES {
            for op in 0..OPS {
                let size = element_bytes(datatype).unwrap();
                let mut target = vec![0u8; 3 * size];
                let mut found = vec![0xEEu8; 3 * size];
                let zeros = vec![0u8; 3 * size];
                // SAFETY: the buffers hold three elements.
                let done = unsafe {
                    apply(op, datatype, target.as_mut_ptr(), &zeros, &zeros, &mut found, 3)
                };
                if is_sensible(datatype, op) {
                    assert_eq!(done, Ok(()), "type {datatype} op {op}");
                    assert_eq!(found, zeros, "the old values come back");
                } else {
                    assert_eq!(done, Err(Errno::EOPNOTSUPP), "type {datatype} op {op}");
                    assert_eq!(target, zeros);
                }
            }
        }
    }

    #[test]
    fn integers() {
        check(INT32, OP_SUM, [5, i32::MAX], [7, 1], [0, 0], [12, i32::MIN]);
        check(UINT8, OP_PROD, [16u8, 3], [16, 5], [0, 0], [0, 15]);
        check(INT16, OP_MIN, [-5i16, 3], [2, -9], [0, 0], [-5, -9]);
        check(UINT16, OP_MAX, [5u16, 3], [2, 9], [0, 0], [5, 9]);
        check(UINT64, OP_LOR, [0u64, 4], [0, 0], [0, 0], [0, 1]);
        check(INT64, OP_LAND, [2i64, 4], [4, 0], [0, 0], [1, 0]);
        check(INT8, OP_LXOR, [2i8, 0], [4, 3], [0, 0], [0, 1]);
        check(UINT32, OP_BOR, [0b1100u32, 0], [0b1010, 1], [0, 0], [0b1110, 1]);
        check(UINT32, OP_BAND, [0b1100u32, 7], [0b1010, 8], [0, 0], [0b1000, 0]);
        check(UINT32, OP_BXOR, [0b1100u32, 7], [0b1010, 7], [0, 0], [0b0110, 0]);
        check(UINT128, OP_SUM, [u128::MAX, 1], [1, 1], [0, 0], [0, 2]);
        check(INT64, OP_READ, [2i64, 4], [9, 9], [0, 0], [2, 4]);
        check(INT64, OP_WRITE, [2i64, 4], [9, 8], [0, 0], [9, 8]);
        check(UINT8, OP_MSWAP, [0xF0u8, 0], [0x0F, 0xFF], [0x3C, 0x81], [0xCC, 0x81]);
    }

    /// The compare value is the left operand: FI_CSWAP_LT writes if compare < target.
    #[test]
    fn swaps_compare_the_given_value_with_the_target() {
        check(INT32, OP_CSWAP, [1, 2], [9, 9], [1, 1], [9, 2]);
        check(INT32, OP_CSWAP_NE, [1, 2], [9, 9], [1, 1], [1, 9]);
        check(INT32, OP_CSWAP_LE, [1, 2], [9, 9], [1, 3], [9, 2]);
        check(INT32, OP_CSWAP_LT, [1, 2], [9, 9], [1, 1], [1, 9]);
        check(INT32, OP_CSWAP_GE, [1, 2], [9, 9], [1, 1], [9, 2]);
        check(INT32, OP_CSWAP_GT, [1, 2], [9, 9], [1, 3], [1, 9]);
        check(DOUBLE, OP_CSWAP_LT, [1.0, f64::NAN], [9.0, 9.0], [0.5, 0.5], [9.0, f64::NAN]);
    }

    #[test]
    fn reals() {
        check(FLOAT, OP_SUM, [1.5f32, -1.0], [2.0, 1.0], [0.0, 0.0], [3.5, 0.0]);
        check(DOUBLE, OP_PROD, [1.5, -1.0], [2.0, 4.0], [0.0, 0.0], [3.0, -4.0]);
        check(DOUBLE, OP_MIN, [1.5, -1.0], [2.0, -4.0], [0.0, 0.0], [1.5, -4.0]);
        check(FLOAT, OP_LXOR, [0.0f32, 2.0], [3.0, 3.0], [0.0, 0.0], [1.0, 0.0]);
    }

    #[test]
    fn complex_numbers() {
        let sum = [[4.0, 6.0], [0.0, 0.0]];
        check(DOUBLE_COMPLEX, OP_SUM, [[1.0, 2.0], [0.0; 2]], [[3.0, 4.0], [0.0; 2]], ZEROS, sum);
        let product = [[-5.0, 10.0], [0.0, 0.0]];
        let old = [[1.0, 2.0], [0.0; 2]];
        check(DOUBLE_COMPLEX, OP_PROD, old, [[3.0, 4.0], [1.0, 1.0]], ZEROS, product);
        check(DOUBLE_COMPLEX, OP_LOR, old, ZEROS, ZEROS, [[1.0, 0.0], [0.0, 0.0]]);
    }
    const ZEROS: [[f64; 2]; 2] = [[0.0; 2]; 2];

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn long_doubles() {
        let of = |values: [f64; 2]| values.map(|value| x87::LongDouble::of(value).to_bytes());
        let zeros = of([0.0, 0.0]);
        let table = [
            (OP_SUM, [3.75, -1.0]),
            (OP_PROD, [3.375, -6.0]),
            (OP_MIN, [1.5, -3.0]),
            (OP_MAX, [2.25, 2.0]),
            (OP_LAND, [1.0, 1.0]),
            (OP_WRITE, [2.25, 2.0]),
        ];
        for (op, expected) in table {
            check(LONG_DOUBLE, op, of([1.5, -3.0]), of([2.25, 2.0]), zeros, of(expected));
        }
        let (old, new) = (of([1.5, f64::NAN]), of([9.0, 9.0]));
        check(LONG_DOUBLE, OP_CSWAP, old, new, of([1.5, f64::NAN]), [new[0], old[1]]);
        check(LONG_DOUBLE, OP_CSWAP_GE, old, new, of([2.0, 0.0]), [new[0], old[1]]);
        // The type is more precise than a double: 1 + 2^-60 is not 1.
        let tiny = of([(-60f64).exp2(), 0.0]);
        let mut sum = of([1.0, 0.0]);
        sum[0][0] = 8;
        check(LONG_DOUBLE, OP_SUM, of([1.0, 0.0]), tiny, zeros, sum);
    }

    /// The memory is read-only, so that a store would end the test.
    #[test]
    fn what_changes_nothing_stores_nothing() {
        const PAGE: usize = 4096;
        let protection = rustix::mm::ProtFlags::READ;
        let flags = rustix::mm::MapFlags::PRIVATE;
        // SAFETY: the mapping is new, zeroed, and unmapped below.
        let page =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, protection, flags) };
        let page = page.unwrap();
        let (one, zero) = (1u64.to_ne_bytes(), [0; 8]);
        let mut old = [0xEE; 8];
        // SAFETY: the mapping holds an element, which none of the calls changes.
        unsafe {
            assert_eq!(apply(OP_READ, UINT64, page.cast(), &[], &[], &mut old, 1), Ok(()));
            assert_eq!(old, zero);
            for (op, compare) in [(OP_CSWAP, one), (OP_CSWAP_NE, zero), (OP_CSWAP_LT, zero)] {
                let done = apply(op, UINT64, page.cast(), &one, &compare, &mut old, 1);
                assert_eq!(done, Ok(()), "op {op}");
            }
            rustix::mm::munmap(page, PAGE).unwrap();
        }
    }

    #[test]
    fn a_zero_of_the_other_sign_is_another_value() {
        check(DOUBLE, OP_WRITE, [0.0, 1.0], [-0.0, 1.0], [0.0, 0.0], [-0.0, 1.0]);
    }

    #[test]
    fn short_operands_are_refused() {
        let mut target = [0u8; 8];
        let eight = [0u8; 8];
        // SAFETY: the buffer holds one element; every call is refused.
        unsafe {
            let mut call = |operand: &[u8], compare: &[u8], result: &mut [u8], op| {
                apply(op, INT64, target.as_mut_ptr(), operand, compare, result, 1)
            };
            assert_eq!(call(&eight[..7], &[], &mut [], OP_SUM), Err(Errno::EINVAL));
            assert_eq!(call(&eight, &eight[..7], &mut [], OP_CSWAP), Err(Errno::EINVAL));
            assert_eq!(call(&eight, &[], &mut [0; 7], OP_SUM), Err(Errno::EINVAL));
            assert_eq!(call(&[], &[], &mut [0; 8], OP_READ), Ok(()));
        }
    }

    fn is_sensible(datatype: u32, op: u32) -> bool {
        match op {
            OP_BOR | OP_BAND | OP_BXOR | OP_MSWAP => INTEGERS.contains(&datatype),
            OP_MIN | OP_MAX | OP_CSWAP_LE..=OP_CSWAP_GT => !COMPLEX.contains(&datatype),
            _ => true,
        }
    }

    /// Applies `op` to two elements, at an address that is aligned for no type.
    fn check<T: Copy + Debug>(
        datatype: u32,
        op: u32,
        old: [T; 2],
        operand: [T; 2],
        compare: [T; 2],
        expected: [T; 2],
    ) {
        let bytes = size_of::<[T; 2]>();
        let mut target = [vec![0xAA], raw(&old)].concat();
        let mut found = vec![0; bytes];
        let (operand, compare) = (raw(&operand), raw(&compare));
        // SAFETY: the buffer holds two elements behind its first byte.
        let done = unsafe {
            apply(op, datatype, target[1..].as_mut_ptr(), &operand, &compare, &mut found, 2)
        };
        assert_eq!(done, Ok(()), "type {datatype} op {op}");
        assert_eq!(target[1..], raw(&expected), "type {datatype} op {op}");
        assert_eq!(found, raw(&old), "the old values come back");
    }

    fn raw<T>(values: &[T; 2]) -> Vec<u8> {
        // SAFETY: the values are numbers without padding.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of::<[T; 2]>()).to_vec() }
    }
}
